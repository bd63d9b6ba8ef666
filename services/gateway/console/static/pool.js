// The pool: every store node with its tiers, how full they are, and what is wrong.

import { meter } from "./charts.js";
import { el, put } from "./dom.js";
import { bytes, count, duration, percent } from "./format.js";
import { badge, silence, tile } from "./parts.js";
import { table } from "./table.js";

const TIERS = { hbm: "GPU", dram: "DRAM", ssd: "SSD", shared: "shared", disk: "disks" };

export function pool(root) {
  const note = el("div");
  const sums = el("section", { class: "tiles", "aria-label": "Tiers" });
  const list = table({
    label: "Store nodes",
    noun: ["node", "nodes"],
    empty: "No store node is registered.",
    key: (row) => row.id,
    columns: [
      { name: "node", value: (row) => row.id, cell: (row) => el("span", { class: "name", title: row.id }, row.id) },
      { name: "state", value: (row) => row.state, cell: (row) => badge(row.state) },
      { name: "memory", value: (row) => full(row), cell: (row) => meter(full(row), `${percent(full(row))} of ${bytes(row.capacity_bytes)}`) },
      { name: "tiers", value: (row) => row.tiers.map((tier) => TIERS[tier.tier] ?? tier.tier).join(" "), cell: tiers },
      { name: "pinned", number: true, wide: true, value: (row) => row.pinned_bytes, cell: (row) => bytes(row.pinned_bytes) },
      { name: "blocks", number: true, value: (row) => row.blocks, cell: (row) => count(row.blocks) },
      { name: "heard", number: true, wide: true, value: (row) => row.age_s, cell: (row) => duration(row.age_s), title: "time since the last heartbeat" },
      { name: "place", wide: true, value: (row) => row.place || row.host, cell: (row) => el("span", { class: "name", title: row.place || row.host }, row.place || row.host || "–") },
      { name: "remark", value: (row) => row.remark, cell: (row) => row.remark || "" },
    ],
  });
  put(root, el("h1", null, "Pool"), note, sums, list.node);
  return {
    topic: "pool",
    filter: list.filter,
    take(document) {
      put(note, silence(document));
      put(sums, totals(document.nodes ?? []));
      list.show(document.nodes ?? []);
    },
    close: list.close,
  };
}

function full(row) {
  return row.capacity_bytes ? row.used_bytes / row.capacity_bytes : null;
}

function tiers(row) {
  return el("span", { class: "tiers" }, row.tiers.map((tier) => el("span", { class: `tier ${Object.hasOwn(TIERS, tier.tier) ? tier.tier : ""}` }, `${TIERS[tier.tier] ?? tier.tier} ${bytes(tier.capacity_bytes ?? tier.used_bytes)}`)));
}

/** A figure for each tier: its size, and what lies in it where nodes say so. */
function totals(nodes) {
  const found = new Map();
  for (const node of nodes) {
    for (const tier of node.tiers) {
      const sum = found.get(tier.tier) ?? { capacity: 0, used: 0, nodes: 0, unknown: false };
      sum.capacity += tier.capacity_bytes ?? 0;
      sum.used += tier.used_bytes ?? 0;
      sum.unknown ||= tier.used_bytes === null;
      sum.nodes += 1;
      found.set(tier.tier, sum);
    }
  }
  return [...found].map(([tier, sum]) => tile(TIERS[tier] ?? tier,
    sum.capacity ? bytes(sum.capacity) : bytes(sum.used),
    `${sum.capacity ? (sum.unknown ? "use is not said by tier" : `${percent(sum.used / sum.capacity)} used`) : "of blocks"} · ${sum.nodes} ${sum.nodes === 1 ? "node" : "nodes"}`));
}
