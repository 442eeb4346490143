// The texts of the page, in the reader's language: the browser's, or the one that was chosen here.

import en from "./texts/en.js";
import zh from "./texts/zh.js";

const CATALOGUES = { en, zh };
const KEPT = "penstock-language";
const MOST = 1000; // characters of a text that is compared with patterns: those of strangers may be made to be slow

function kept() {
  try {
    return localStorage.getItem(KEPT);
  } catch {
    return null; // storage is switched off
  }
}

const language = [kept(), ...navigator.languages.map((one) => one.slice(0, 2)), "en"].find((one) => one in CATALOGUES);
const { page, api } = CATALOGUES[language];

export function switchLanguage() {
  try {
    localStorage.setItem(KEPT, language === "en" ? "zh" : "en");
  } catch {
    return;
  }
  location.reload();
}

export const has = (key) => key in page;

// The text of a key; values replace {name}.
export function t(key, values = {}) {
  if (!has(key)) throw new Error(`no text ${key}`);
  return page[key].replace(/\{(\w+)\}/g, (found, name) => String(values[name] ?? found));
}

const escaped = (text) => text.replace(/[.*+?^$()|[\]\\]/g, "\\$&");
const patterns = Object.entries(api).filter(([from]) => from.includes("{}"))
  .map(([from, to]) => [new RegExp(`^${from.split("{}").map(escaped).join("([^]+?)")}$`), to]);

// A text that the API sends, such as a state or a diagnosis; one that is not in the catalogue as it is. {1} is the first {} of its key.
export function said(text) {
  if (Object.hasOwn(api, text)) return api[text];
  if (!text || text.length > MOST) return text;
  for (const [pattern, to] of patterns) {
    const values = pattern.exec(text);
    if (values) return to.replace(/\{(\d)\}/g, (_, at) => said(values[at]));
  }
  return text;
}
