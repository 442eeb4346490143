"use strict";
// Runs before the page is drawn, so that it does not flash in the other colours.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("penstock-theme");
  } catch {
    // storage is switched off
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
