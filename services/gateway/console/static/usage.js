// A tenant's own page: what it used and what that costs, its limits, its last requests. Nothing of others is in it.

import { chart } from "./charts.js";
import { el, put } from "./dom.js";
import { DASH, clock, count, money, ms, percent } from "./format.js";
import { badge, tile } from "./parts.js";
import { poll } from "./poll.js";
import { plain, table } from "./table.js";

const HOUR_S = 3600;

export function usage(root, go, { took, ended }) {
  const top = el("div", { class: "stack" });
  const list = table({
    label: "Your last requests", noun: ["request", "requests"], empty: "This gateway has seen none of your requests since it was started.",
    key: (row) => `${row.request_id} ${row.ended_s}`,
    columns: [
      { name: "ended", value: (row) => row.ended_s, cell: (row) => clock(row.ended_s) },
      { name: "request", value: (row) => row.request_id, cell: (row) => name(row.request_id) },
      { name: "result", value: (row) => row.code, cell: (row) => badge(row.code === "OK" ? "finished" : row.code) },
      { name: "took", number: true, value: (row) => row.elapsed_ms, cell: (row) => ms(row.elapsed_ms) },
      { name: "input", number: true, value: (row) => row.input_tokens, cell: (row) => count(row.input_tokens) },
      { name: "cached", number: true, value: (row) => share(row), cell: (row) => percent(share(row)) },
      { name: "output", number: true, value: (row) => row.output_tokens, cell: (row) => count(row.output_tokens) },
      { name: "model", value: (row) => row.model, cell: (row) => name(row.model) },
      { name: "key", wide: true, value: (row) => row.key_id, cell: (row) => name(row.key_id) },
    ],
  });
  put(root, el("h1", null, "Usage"), top, el("h2", null, "Last requests"), list.node);
  const asked = poll("/console/usage", { took, ended, failed: (text) => put(top, el("p", { class: "note bad", role: "alert" }, text)) });
  return {
    topic: null,
    filter: list.filter,
    take(document) {
      put(top, draw(document));
      list.show(document.requests);
    },
    close() {
      asked.close();
      list.close();
    },
  };
}

function draw(document) {
  const all = sum(document.rows);
  return [
    el("p", { class: "dim" }, `Tenant ${document.tenant}, the last ${document.days} days, as gateways metered it. `,
      document.metered ? "It is a few seconds old." : "Nothing is metered now."),
    el("section", { class: "tiles", "aria-label": "Figures" },
      tile("Requests", count(all.requests), `${count(all.failed)} failed, ${count(all.cancelled)} cancelled`),
      tile("Input tokens", count(all.input_tokens), `${percent(share(all))} of them from a cache`),
      tile("Output tokens", count(all.output_tokens), all.estimated_tokens ? `${count(all.estimated_tokens)} of all tokens are estimates` : ""),
      document.currency === null ? null : tile("Cost", money(all.cost, document.currency),
        [all.saved > 0 ? `caches saved ${money(all.saved, document.currency)}` : "", all.unpriced_tokens ? `${count(all.unpriced_tokens)} tokens have no price` : ""].filter(Boolean).join("; "))),
    el("section", { class: "plots", "aria-label": "Over time" }, hours(document, "Requests in an hour", "requests", "a"),
      hours(document, "Output tokens in an hour", "output_tokens", "a")),
    el("section", { class: "halves" },
      el("div", { class: "panel" }, el("h2", null, "By key and model"), byKey(document)),
      el("div", { class: "panel" }, el("h2", null, "Limits"), limits(document))),
  ];
}

/** One column for each of the last 24 hours; an hour without a row had no request. */
function hours(document, title, field, tone) {
  const known = new Map(document.hours.map((row) => [row.hour_s, row[field]]));
  const last = Math.floor(document.at_s / HOUR_S) * HOUR_S;
  const points = Array.from({ length: 24 }, (_, at) => last - (23 - at) * HOUR_S);
  return chart({ title, points, bars: true, format: count, lines: [{ name: "last", values: points.map((at) => known.get(at) ?? 0), tone }] });
}

function byKey(document) {
  if (!document.rows.length) return el("p", { class: "dim" }, "Nothing yet.");
  return plain("Usage by key and model", ["key", "model", "class", ["requests"], ["input"], ["output"], ...(document.currency === null ? [] : [["cost"]])],
    document.rows.map((row) => [row.key_id, row.model, row.work_class, count(row.requests), count(row.input_tokens), count(row.output_tokens),
      ...(document.currency === null ? [] : [money(row.cost, document.currency)])]));
}

function limits(document) {
  const [tenant, key] = [document.limits, document.key_limits];
  const limit = (value) => (value ? count(value) : "no limit");
  const now = (said, field) => `${count(said[field])} at this gateway now`;
  return plain("Limits", ["what", ["tenant"], ["this key alone"]], [
    ["requests in a minute", limit(tenant.requests_per_minute), limit(key.requests_per_minute)],
    ["tokens in a minute", limit(tenant.tokens_per_minute), limit(key.tokens_per_minute)],
    [`requests under way (${now(tenant, "requests_open")})`, limit(tenant.requests_open_max), limit(key.requests_open_max)],
    [`tokens under way (${now(tenant, "tokens_open")})`, limit(tenant.tokens_open_max), limit(key.tokens_open_max)],
    ...(document.currency === null ? [] : [["money in this month (UTC), spent of", budget(tenant, document.currency), budget(key, document.currency)]]),
  ]);
}

function budget(said, currency) {
  return `${money(said.spent, currency)} of ${said.money_per_month ? money(said.money_per_month, currency) : "no limit"}`;
}

/** Sums over rows of usage. */
export function sum(rows) {
  const names = ["requests", "failed", "cancelled", "input_tokens", "cached_tokens", "output_tokens", "estimated_tokens", "cost", "saved", "unpriced_tokens"];
  return Object.fromEntries(names.map((each) => [each, rows.reduce((so, row) => so + (row[each] ?? 0), 0)]));
}

function share(row) {
  return row.input_tokens ? row.cached_tokens / row.input_tokens : null;
}

function name(text) {
  return text ? el("span", { class: "name", title: text }, text) : DASH;
}
