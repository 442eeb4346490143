// The texts of the page, in the reader's language: the browser's, or the one that was chosen here; texts.json has all of them.

const LANGUAGES = ["en", "zh"]; // in the order of each entry of texts.json
const KEPT = "penstock-language";
const MOST = 1000; // characters of a text that is compared with patterns: those of strangers may be made to be slow

function kept() {
  try {
    return localStorage.getItem(KEPT);
  } catch {
    return null; // storage is switched off
  }
}

const { page, api } = await (await fetch("/static/texts.json")).json();
const language = [kept(), ...navigator.languages.map((one) => one.slice(0, 2)), "en"].find((one) => LANGUAGES.includes(one));
const place = LANGUAGES.indexOf(language);
// How numbers and dates are written: as in the reader's country, where the browser says which.
export const locale = navigator.languages.find((one) => one.slice(0, 2) === language) || page["frame.lang"][place];
const plural = new Intl.PluralRules(locale);

export function switchLanguage() {
  try {
    localStorage.setItem(KEPT, language === "en" ? "zh" : "en");
  } catch {
    return;
  }
  location.reload();
}

export const has = (key) => Object.hasOwn(page, key);

// The text of a key; values replace {name}. One with a "|" has two forms, of which n chooses: that of one, and that of more.
export function t(key, values = {}) {
  if (!has(key)) throw new Error(`no text ${key}`);
  const forms = page[key][place].split("|");
  return (plural.select(Number(values.n)) === "one" ? forms[0] : forms.at(-1)).replace(/\{(\w+)\}/g, (found, name) => String(values[name] ?? found));
}

// A text of the API: its Chinese, or its English, where the API's own is a name, and its Chinese.
const texts = new Map(Object.entries(api).map(([from, to]) => [from, typeof to === "string" ? [from, to][place] : to[place]]));
const escaped = (text) => text.replace(/[.*+?^$()|[\]\\]/g, "\\$&");
const patterns = [...texts].filter(([from, to]) => from.includes("{}") && from !== to)
  .map(([from, to]) => [new RegExp(`^${from.split("{}").map(escaped).join("([^]+?)")}$`), to]);

// What the API says, such as a state or a diagnosis; as it is, where the catalogue has no text of it. {1} is the first {} of its key.
export function said(text) {
  if (texts.has(text)) return texts.get(text);
  if (!text || text.length > MOST) return text;
  for (const [pattern, to] of patterns) {
    const values = pattern.exec(text);
    if (values) return to.replace(/\{(\d)\}/g, (_, at) => said(values[at]));
  }
  return text;
}
