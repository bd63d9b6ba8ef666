// What each tenant used in the last days, for operators.

import { el, put } from "./dom.js";
import { count, money, percent } from "./format.js";
import { tile } from "./parts.js";
import { poll } from "./poll.js";
import { table } from "./table.js";
import { sum } from "./usage.js";

export function tenants(root, go, { took, ended }) {
  const top = el("div", { class: "stack" });
  let currency = null;
  const price = (field) => (row) => (currency === null ? null : row[field]);
  const list = table({
    label: "Tenants", noun: ["tenant", "tenants"], empty: "No request has been metered on this host yet.",
    key: (row) => row.tenant, sort: { column: 1, down: true },
    columns: [
      { name: "tenant", value: (row) => row.tenant, cell: (row) => el("span", { class: "name", title: row.tenant }, row.tenant) },
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
  put(root, el("h1", null, "Tenants"), top, list.node);
  const asked = poll("/console/usage", { took, ended, failed: (text) => put(top, el("p", { class: "note bad", role: "alert" }, text)) });
  return {
    topic: null,
    filter: list.filter,
    take(document) {
      currency = document.currency;
      const all = sum(document.rows);
      put(top,
        el("p", { class: "dim" }, `The last ${document.days} days, as the gateways of this host metered it. `,
          document.metered ? "mooncache usage has all of it." : "Nothing is metered now: gateway.usage_enabled is false."),
        el("section", { class: "tiles", "aria-label": "Figures" },
          tile("Requests", count(all.requests), `${count(all.failed)} failed, ${count(all.cancelled)} cancelled`),
          tile("Input tokens", count(all.input_tokens), `${percent(share(all))} of them from a cache`),
          tile("Output tokens", count(all.output_tokens)),
          currency === null ? null : tile("Tenants pay", money(all.cost, currency),
            all.unpriced_tokens ? `${count(all.unpriced_tokens)} tokens have no price` : all.saved > 0 ? `caches saved them ${money(all.saved, currency)}` : "")));
      list.show(document.rows);
    },
    close() {
      asked.close();
      list.close();
    },
  };
}

function share(row) {
  return row.input_tokens ? row.cached_tokens / row.input_tokens : null;
}
