// What is read most of the pool, as the tree that prompts make: a beginning, and what goes on from it.

import { actColumn, prefixDialog } from "./acts.js";
import { meter } from "./charts.js";
import { el, put } from "./dom.js";
import { count, duration } from "./format.js";
import { silence } from "./parts.js";
import { table } from "./table.js";

const MINUTES = 2; // reads fade with this time constant

export function prefixes(root, go, { acts }) {
  const note = el("div");
  let most = 1;
  const list = table({
    label: "Hot prefixes", noun: ["prefix", "prefixes"], empty: "No prompt has found a beginning in the pool lately.",
    key: (row) => row.id,
    columns: [
      { name: "prefix", value: (row) => row.path, cell: (row) => el("span", { class: "name long", title: row.id, style: { "padding-left": `${Math.min(row.depth, 16) * 16}px` } }, row.depth ? "└ " : "", blocks(row)) },
      ...actColumn(acts, prefixDialog),
      { name: "read", value: (row) => row.reads * row.tokens, cell: (row) => meter(row.reads * row.tokens / most, `${count(row.reads * row.tokens / MINUTES)} tokens/min`, { plain: true }), title: "tokens that were read of it a minute, lately" },
      { name: "requests", number: true, value: (row) => row.reads, cell: (row) => `${(row.reads / MINUTES).toFixed(1)}/min` },
      { name: "tokens", number: true, value: (row) => row.tokens, cell: (row) => count(row.tokens) },
      { name: "copies", number: true, value: (row) => row.copies, cell: (row) => count(row.copies), title: "copies of each block that were ordered" },
      { name: "read on", wide: true, value: (row) => row.hosts.join(" "), cell: (row) => el("span", { class: "name", title: row.hosts.join(", ") }, row.hosts.join(", ") || "–") },
      { name: "tenant", value: (row) => row.tenant, cell: (row) => el("span", { class: "name", title: row.tenant }, row.tenant || "–") },
      { name: "model", wide: true, value: (row) => row.model, cell: (row) => el("span", { class: "name", title: row.model }, row.model) },
    ],
  });
  put(root, el("h1", null, "Hot prefixes"), el("p", { class: "dim" }, `Blocks that several prompts begin with, in segments of doubling length. Reads are counted over about ${duration(60 * MINUTES)}.`), note, list.node);
  return {
    topic: "prefixes",
    filter: list.filter,
    take(document) {
      const off = document.prefixes && !document.counted ? el("p", { class: "note" }, "Nothing is counted: conductor.replicate_bytes_per_s is 0.") : null;
      put(note, silence(document), off);
      const rows = tree(document.prefixes ?? []);
      most = Math.max(1, ...rows.map((row) => row.reads * row.tokens));
      list.show(rows);
    },
    close: list.close,
  };
}

function blocks(row) {
  const last = row.first_block + row.blocks;
  return row.blocks === 1 ? `block ${last}` : `blocks ${row.first_block + 1} to ${last}`;
}

/** Rows in the order of the tree, the hottest beginning first, each with its depth. */
function tree(rows) {
  const known = new Map(rows.map((row) => [row.id, row]));
  const under = new Map();
  for (const row of rows) {
    const parent = known.has(row.parent) ? row.parent : null;
    if (!under.has(parent)) under.set(parent, []);
    under.get(parent).push(row);
  }
  const found = [];
  const waiting = (under.get(null) ?? []).map((row) => ({ ...row, depth: 0, path: "" })).reverse();
  while (waiting.length && found.length < rows.length) {
    const row = waiting.pop();
    row.path = `${String(found.length).padStart(4, "0")}`;
    found.push(row);
    for (const child of [...(under.get(row.id) ?? [])].reverse()) waiting.push({ ...child, depth: row.depth + 1 });
  }
  return found;
}
