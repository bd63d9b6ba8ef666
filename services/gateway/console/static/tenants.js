// What each tenant used in the last days, and how many keys it has, for operators. A row opens its keys and limits.

import { el, put } from "./dom.js";
import { count, money, percent } from "./format.js";
import { tile } from "./parts.js";
import { poll } from "./poll.js";
import { table } from "./table.js";
import { sum } from "./usage.js";

const NOTHING = { requests: 0, failed: 0, cancelled: 0, input_tokens: 0, cached_tokens: 0, output_tokens: 0, cost: 0, saved: 0 };

export function tenants(root, go, { ended, acts, took }) {
  const top = el("div", { class: "stack" });
  let used = [];
  let keys = {};
  let currency = null;
  const price = (field) => (row) => (currency === null ? null : row[field]);
  const list = table({
    label: "Tenants", noun: ["tenant", "tenants"], empty: "No request has been metered yet, and no key was made.",
    key: (row) => row.tenant, sort: { column: 2, down: true }, open: (row) => go(`#/tenant/${encodeURIComponent(row.tenant)}`),
    columns: [
      { name: "tenant", value: (row) => row.tenant, cell: (row) => el("a", { href: `#/tenant/${encodeURIComponent(row.tenant)}`, class: "name", title: row.tenant }, row.tenant) },
      { name: "keys", number: true, value: (row) => keys[row.tenant] ?? 0, title: "valid keys that were made here" },
      { name: "requests", number: true, value: (row) => row.requests, cell: (row) => count(row.requests) },
      { name: "failed", number: true, value: (row) => row.failed, cell: (row) => count(row.failed) },
      { name: "cancelled", number: true, wide: true, value: (row) => row.cancelled, cell: (row) => count(row.cancelled) },
      { name: "input", number: true, value: (row) => row.input_tokens, cell: (row) => count(row.input_tokens) },
      { name: "cached", number: true, value: share, cell: (row) => percent(share(row)), title: "share of input tokens" },
      { name: "output", number: true, value: (row) => row.output_tokens, cell: (row) => count(row.output_tokens) },
      { name: "pays", number: true, value: price("cost"), cell: (row) => money(price("cost")(row), currency ?? "") , title: "by the prices of tokens in the price book" },
      { name: "saved", number: true, wide: true, value: price("saved"), cell: (row) => money(price("saved")(row), currency ?? ""), title: "what cached tokens would have cost more as computed ones" },
    ],
  });
  const other = el("input", { type: "text", class: "filter", placeholder: "Another tenant", "aria-label": "Name of another tenant", autocomplete: "off", maxlength: 63, required: true });
  const find = el("form", { class: "find", onsubmit: (event) => { event.preventDefault(); go(`#/tenant/${encodeURIComponent(other.value.trim())}`); } },
    other, el("button", { type: "submit" }, acts ? "Keys and limits …" : "Keys …"));
  put(root, el("div", { class: "heading" }, el("h1", null, "Tenants"), find), top, list.node);
  const failed = (text) => put(top, el("p", { class: "note bad", role: "alert" }, text));
  const asked = poll("/console/usage", { took, ended, failed });
  const counted = poll("/console/keys", { took: (document) => { keys = document.tenants; show(); }, ended, failed });

  /** Tenants that used something, and those that have a key. */
  function show() {
    const known = new Set(used.map((row) => row.tenant));
    list.show([...used, ...Object.keys(keys).filter((name) => !known.has(name)).map((name) => ({ tenant: name, ...NOTHING }))]);
  }

  return {
    topic: null,
    filter: list.filter,
    take(document) {
      currency = document.currency;
      const all = sum(document.rows);
      put(top,
        el("p", { class: "dim" }, `The last ${document.days} days, as gateways metered it. `,
          document.metered ? "mooncache usage has all of it." : "Nothing is metered now: gateway.usage_enabled is false."),
        el("section", { class: "tiles", "aria-label": "Figures" },
          tile("Requests", count(all.requests), `${count(all.failed)} failed, ${count(all.cancelled)} cancelled`),
          tile("Input tokens", count(all.input_tokens), `${percent(share(all))} of them from a cache`),
          tile("Output tokens", count(all.output_tokens)),
          currency === null ? null : tile("Tenants pay", money(all.cost, currency),
            all.unpriced_tokens ? `${count(all.unpriced_tokens)} tokens have no price` : all.saved > 0 ? `caches saved them ${money(all.saved, currency)}` : "")));
      used = document.rows;
      show();
    },
    close() {
      asked.close();
      counted.close();
      list.close();
    },
  };
}

function share(row) {
  return row.input_tokens ? row.cached_tokens / row.input_tokens : null;
}
