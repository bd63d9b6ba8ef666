// The last decisions, the newest first; each row opens its request.

import { el, put } from "./dom.js";
import { DASH, clock, count, ms, percent } from "./format.js";
import { badge, silence } from "./parts.js";
import { table } from "./table.js";

export function requests(root, go) {
  const open = (row) => go(`#/request/${encodeURIComponent(row.decision_id)}`);
  const note = el("div");
  const list = table({
    label: "Last requests",
    noun: ["request", "requests"],
    empty: "No request has been scheduled yet. Send one to /v1/chat/completions.",
    key: (row) => row.decision_id,
    open,
    columns: [
      { name: "time", value: (row) => row.made_at_s, cell: (row) => clock(row.made_at_s) },
      { name: "request", value: (row) => row.request_id,
        cell: (row) => el("a", { class: "name", href: `#/request/${encodeURIComponent(row.decision_id)}`, title: row.request_id }, row.request_id || row.decision_id) },
      { name: "state", value: (row) => row.state, cell: (row) => badge(row.state) },
      { name: "promise", value: (row) => (row.kept === null ? null : Number(row.kept)), title: "whether first token and time between tokens were as promised",
        cell: (row) => (row.kept === null ? DASH : row.kept ? el("span", { class: "good-text" }, "kept") : el("span", { class: "bad-text" }, "broken")) },
      { name: "first token", number: true, value: (row) => row.ttft_ms, cell: (row) => ms(row.ttft_ms) },
      { name: "whole", number: true, value: (row) => row.total_ms, cell: (row) => ms(row.total_ms) },
      { name: "prompt", number: true, value: (row) => row.prompt_tokens, cell: (row) => count(row.prompt_tokens) },
      { name: "cached", number: true, value: (row) => share(row), cell: (row) => percent(share(row)) },
      { name: "output", number: true, value: (row) => row.output_tokens, cell: (row) => count(row.output_tokens) },
      { name: "prefill", wide: true, value: (row) => row.prefill || null, cell: (row) => clipped(row.prefill) },
      { name: "decode", wide: true, value: (row) => row.decode || null, cell: (row) => clipped(row.decode) },
      { name: "tenant", wide: true, value: (row) => row.tenant, cell: (row) => clipped(row.tenant) },
      { name: "model", wide: true, value: (row) => row.model, cell: (row) => clipped(row.model) },
    ],
  });
  const find = el("input", { type: "text", class: "filter", "aria-label": "Open a request by its id", placeholder: "Request or decision id", autocomplete: "off", maxlength: "256" });
  const form = el("form", { class: "find", onsubmit: (event) => {
    event.preventDefault();
    if (find.value.trim()) go(`#/request/${encodeURIComponent(find.value.trim())}`);
  } }, find, el("button", { type: "submit" }, "Open"));
  put(root, el("div", { class: "heading" }, el("h1", null, "Requests"), form), note, list.node);
  return {
    topic: "requests",
    filter: list.filter,
    take(document) {
      put(note, silence(document));
      list.show(document.requests);
    },
    close: list.close,
  };
}

function share(row) {
  return row.cached_tokens === null || !row.prompt_tokens ? null : row.cached_tokens / row.prompt_tokens;
}

function clipped(text) {
  return text ? el("span", { class: "name", title: text }, text) : DASH;
}
