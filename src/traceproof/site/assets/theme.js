"use strict";
// Before the page is painted: the theme that was chosen, else the system's.
(() => {
  const key = "traceproof-theme";
  const root = document.documentElement;
  const stored = () => { try { return localStorage.getItem(key); } catch { return null; } };
  const store = (value) => { try { localStorage.setItem(key, value); } catch { /* private mode: not kept */ } };
  const dark = () => {
    const chosen = root.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const chosen = stored();
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => {
      button.textContent = dark() ? "Light theme" : "Dark theme";
      dispatchEvent(new Event("themechange"));
    };
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      store(root.dataset.theme);
      show();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
    show();
  });
})();
