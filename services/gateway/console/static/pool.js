// The pool: every store node with its tiers, how full they are, what is wrong; what tenants hold of it; what moves.

import { actColumn, nodeDialog } from "./acts.js";
import { meter } from "./charts.js";
import { el, put } from "./dom.js";
import { bytes, count, duration, percent } from "./format.js";
import { badge, silence, tile } from "./parts.js";
import { plain, table } from "./table.js";

const TIERS = { hbm: "GPU", dram: "DRAM", ssd: "SSD", shared: "shared", disk: "disks" };

export function pool(root, go, { acts }) {
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
      ...actColumn(acts, nodeDialog),
      { name: "memory", value: (row) => full(row), cell: (row) => meter(full(row), `${percent(full(row))} of ${bytes(row.capacity_bytes)}`) },
      { name: "tiers", value: (row) => row.tiers.map((tier) => TIERS[tier.tier] ?? tier.tier).join(" "), cell: tiers },
      { name: "pinned", number: true, wide: true, value: (row) => row.pinned_bytes, cell: (row) => bytes(row.pinned_bytes) },
      { name: "stored", number: true, wide: true, value: (row) => row.stored_per_s, cell: (row) => rate(row.stored_per_s), title: "bytes that are stored here in a second" },
      { name: "read", number: true, wide: true, value: (row) => row.read_per_s, cell: (row) => rate(row.read_per_s), title: "bytes that are read from here in a second" },
      { name: "blocks", number: true, value: (row) => row.blocks, cell: (row) => count(row.blocks) },
      { name: "of max", number: true, wide: true, value: (row) => row.hits_of_unlimited, cell: (row) => percent(row.hits_of_unlimited), title: "hits over those of a node with unlimited memory, since it was started; estimated from a sample" },
      { name: "heard", number: true, wide: true, value: (row) => row.age_s, cell: (row) => duration(row.age_s), title: "time since the last heartbeat" },
      { name: "place", wide: true, value: (row) => row.place || row.host, cell: (row) => el("span", { class: "name", title: row.place || row.host }, row.place || row.host || "–") },
      { name: "remark", value: (row) => row.remark, cell: (row) => row.remark || "" },
    ],
  });
  const held = el("section", { class: "panel", "aria-label": "Tenants in the pool", hidden: true });
  const moving = el("section", { class: "panel", "aria-label": "Flows", hidden: true });
  const halves = el("section", { class: "halves" }, moving, held);
  const byNode = table({
    label: "Tenants on nodes", noun: ["share", "shares"], empty: "No tenant holds anything.",
    key: (row) => `${row.node} ${row.tenant}`, sort: { column: 2, down: true },
    columns: [
      { name: "node", value: (row) => row.node, cell: (row) => el("span", { class: "name", title: row.node }, row.node) },
      { name: "tenant", value: (row) => row.tenant, cell: (row) => el("span", { class: "name", title: row.tenant }, row.tenant) },
      { name: "in memory", number: true, value: (row) => row.memory, cell: (row) => bytes(row.memory) },
      { name: "on disks", number: true, value: (row) => row.disk, cell: (row) => bytes(row.disk) },
    ],
  });
  const shares = el("section", { class: "stack", hidden: true }, el("h2", null, "Tenants on nodes"), byNode.node);
  const tasks = el("section", { class: "panel", "aria-label": "Tasks", hidden: true });
  put(root, el("h1", null, "Pool"), note, sums, list.node, halves, shares, tasks);
  return {
    topic: "pool",
    filter: list.filter,
    take(document) {
      put(note, silence(document));
      put(sums, totals(document.nodes ?? []), copies(document.repair), rebalance(document.repair?.rebalance));
      tasks.hidden = !document.tasks?.length;
      put(tasks, el("h2", null, "Tasks"), taskTable(document.tasks ?? []));
      list.show(document.nodes ?? []);
      moving.hidden = !document.nodes?.length;
      put(moving, el("h2", null, "Flows, in the last seconds"), flowTable(document.flows ?? []));
      const tenants = document.tenants;
      held.hidden = shares.hidden = !tenants?.tenants.length;
      if (held.hidden) return;
      put(held, el("h2", null, "Tenants in the pool"), tenantTable(tenants));
      byNode.show(tenants.cells.map(([node, at, memory, disk]) => ({ node, tenant: tenants.tenants[at], memory, disk })));
    },
    close() {
      list.close();
      byNode.close();
    },
  };
}

function full(row) {
  return row.capacity_bytes ? row.used_bytes / row.capacity_bytes : null;
}

function rate(value) {
  return value === null || value === undefined ? "–" : `${bytes(value)}/s`;
}

/** What moves from where to where. */
function flowTable(rows) {
  const value = (row) => (row.tokens_per_s === null ? rate(row.bytes_per_s) : `${count(row.tokens_per_s)} tokens/s`);
  return plain("Flows", ["way", "what", ["in a second"]], rows.map((row) => [`${row.source} → ${row.target}`, row.what, value(row)]));
}

/** What each tenant holds over all nodes; the bar is its share of what all hold. */
function tenantTable({ tenants, others, cells }) {
  const sums = tenants.map(() => ({ memory: 0, disk: 0, nodes: 0 }));
  for (const [, at, memory, disk] of cells) {
    sums[at].memory += memory;
    sums[at].disk += disk;
    sums[at].nodes += 1;
  }
  const all = sums.reduce((so, each) => so + each.memory + each.disk, 0);
  return plain("Tenants in the pool", ["tenant", "share", ["in memory"], ["on disks"], ["nodes"]], tenants.map((name, at) => {
    const share = all ? (sums[at].memory + sums[at].disk) / all : null;
    const text = name === "(others)" && others ? `${name} ${count(others)}` : name;
    return [el("span", { class: "name", title: text }, text), meter(share, percent(share), { plain: true }), bytes(sums[at].memory), bytes(sums[at].disk), count(sums[at].nodes)];
  }));
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

/** Whether blocks have their copies. */
function copies(repair) {
  if (!repair) return null;
  const wanted = `${repair.replicas} wanted of each block`;
  return tile("Copies", repair.state, progress(repair, "to copy") || wanted, { repairing: "busy", waiting: "busy", blocked: "bad" }[repair.state] ?? "");
}

/** Whether blocks move to emptier nodes. */
function rebalance(found) {
  if (!found) return null;
  const fills = `nodes ${found.emptiest_percent} to ${found.fullest_percent} % full`;
  return tile("Rebalance", found.state.replace("_", " "), progress(found, "to move") || fills, { moving: "busy", waiting: "busy" }[found.state] ?? "");
}

/** What is left of a background duty, and its rate; "" when nothing is. */
function progress(duty, verb) {
  const left = [duty.left_bytes ? `${bytes(duty.left_bytes)} ${verb}` : "", duty.left_s ? `${duration(duty.left_s)} left` : "", duty.bytes_per_s ? `${bytes(duty.bytes_per_s)}/s` : ""];
  return left.filter(Boolean).join(" · ");
}

/** The newest tasks of the master: what is drained and copied, and how far it is. */
function taskTable(rows) {
  return plain("Tasks", ["task", "of", "state", ["blocks"], ["failed"], ["copied"], ["since"], "remark"], rows.map((row) => [
    row.kind, el("span", { class: "name", title: row.of }, row.of || "–"), badge(row.state), `${count(row.done)} of ${count(row.blocks)}`, count(row.failed), bytes(row.bytes),
    duration(row.age_s), el("span", { class: "name long", title: row.message }, row.message)]));
}
