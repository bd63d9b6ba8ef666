// Pieces that several pages have.

import { el } from "./dom.js";
import { tone } from "./words.js";

/** A state as a word with a mark; the word says it, the colour only repeats it. */
export function badge(state) {
  return el("span", { class: `badge ${tone(state)}` }, state || "unknown");
}

/** One figure with its name and a remark; title: more about it, for who stays on it. */
export function tile(name, value, remark = "", kind = "", title = null) {
  return el("div", { class: `panel tile ${kind}`, title },
    el("div", { class: "dim" }, name), el("div", { class: "value" }, value), el("div", { class: "dim remark" }, remark));
}

/** Sentences about parts that do not answer. */
export function silence(document) {
  const found = Object.entries(document.silent ?? {});
  if (!found.length) return null;
  const names = { conductor: "Conductor", instances: "Instances", requests: "Requests", pool: "Pool" };
  return el("div", { class: "note bad", role: "alert" },
    el("ul", null, found.map(([part, text]) => el("li", null, el("strong", null, `${names[part] ?? part}: `), text))));
}
