// How long store nodes need to reach each other: a matrix of all pairs, or of those that the filter leaves, and a list.

import { el, put } from "./dom.js";
import { duration, ms, plural } from "./format.js";
import { silence, tile } from "./parts.js";
import { table } from "./table.js";

const NODES_MAX = 40; // in the matrix
const FAR_FACTOR = 4; // times the usual round trip, and more than a millisecond: far
const FAR_MS = 1;

export function network(root) {
  const note = el("div");
  const figures = el("section", { class: "tiles", "aria-label": "Figures" });
  const matrix = el("section", { class: "panel", "aria-label": "Round trips between nodes", hidden: true });
  const name = (text) => el("span", { class: "name", title: text }, text);
  const list = table({
    label: "Ways between nodes", noun: ["way", "ways"], empty: "No way has been measured yet. Each node tries another one every two seconds.",
    key: (row) => row.key, sort: { column: 2, down: true },
    columns: [
      { name: "from", value: (row) => row.from, cell: (row) => name(row.from) },
      { name: "to", value: (row) => row.to, cell: (row) => name(row.to) },
      { name: "median", number: true, value: (row) => row.median, cell: (row) => time(row.median), title: "of the last tries that succeeded" },
      { name: "least", number: true, value: (row) => row.least, cell: (row) => time(row.least) },
      { name: "tries", number: true, wide: true, value: (row) => row.tries, cell: (row) => row.tries, title: "that the median is of" },
      { name: "failed", number: true, value: (row) => row.failures, cell: (row) => el("span", { class: row.failures ? "bad-text" : null }, row.failures), title: "in a row, until now" },
      { name: "tried", number: true, wide: true, value: (row) => row.age, cell: (row) => `${duration(row.age)} ago` },
    ],
  });
  let nodes = [];
  let ways = [];
  list.filter.addEventListener("input", draw);
  put(root, el("h1", null, "Network"),
    el("p", { class: "dim" }, "Round trips between store nodes over their data ports, as the nodes measure them all the time: one try every two seconds, of which the shortest of four round trips counts. Each tries up to 32 others."),
    note, figures, matrix, list.node);

  function draw() {
    const wanted = list.filter.value.trim().toLowerCase();
    const shown = nodes.map((node, at) => ({ ...node, at })).filter((node) => !wanted || node.id.toLowerCase().includes(wanted));
    matrix.hidden = nodes.length < 2 || !ways.length;
    put(matrix, el("h2", null, "From row to column"),
      shown.length > NODES_MAX ? el("p", { class: "dim" }, `Of ${plural(shown.length, "node", "nodes")} the first ${NODES_MAX} are shown. Filter by name to see others.`) : null,
      grid(shown.slice(0, NODES_MAX), ways, usual(ways)));
  }

  return {
    topic: "network",
    filter: list.filter,
    take(document) {
      put(note, silence(document));
      if (!document.nodes) return; // the next look has it
      nodes = document.nodes;
      ways = document.ways.map(([from, to, median, least, tries, failures, age]) => ({
        key: `${from} ${to}`, at: [from, to], from: nodes[from].id, to: nodes[to].id, tries, failures, age,
        median: tries ? median / 1000 : null, least: tries ? least / 1000 : null,
      }));
      put(figures, tiles(nodes, ways));
      draw();
      list.show(ways);
    },
    close: list.close,
  };
}

/** Round trips are often well below a millisecond. */
function time(value) {
  return typeof value === "number" && value < 1 ? `${Math.round(value * 1000)} µs` : ms(value);
}

function middle(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

function usual(ways) {
  return middle(ways.filter((way) => way.median !== null).map((way) => way.median));
}

function tone(way, usually) {
  if (way.failures) return "bad";
  if (way.median === null) return "";
  return way.median > FAR_MS && way.median > FAR_FACTOR * usually ? "busy" : "good";
}

function tiles(nodes, ways) {
  const known = ways.filter((way) => way.median !== null);
  const slowest = known.reduce((one, other) => (one === null || other.median > one.median ? other : one), null);
  const failing = ways.filter((way) => way.failures).length;
  return [
    tile("Usual round trip", time(usual(ways)), `${plural(known.length, "way", "ways")} between ${plural(nodes.length, "node", "nodes")}`),
    tile("Longest", time(slowest?.median), slowest ? `${slowest.from} → ${slowest.to}` : "", slowest && tone(slowest, usual(ways)) === "busy" ? "busy" : ""),
    tile("Not answered", String(failing), "ways whose last try failed", failing ? "bad" : ""),
  ];
}

function grid(shown, ways, usually) {
  const found = new Map(ways.map((way) => [way.key, way]));
  const head = (node, scope) => el("th", { scope, title: `${node.id} on ${node.host}` }, el("span", { class: "name" }, node.id));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Matrix of round trips" },
    el("table", { class: "matrix", "aria-label": "Round trips from the node of a row to the node of a column" },
      el("thead", null, el("tr", null, el("td"), shown.map((node) => head(node, "col")))),
      el("tbody", null, shown.map((from) => el("tr", null, head(from, "row"), shown.map((to) => cell(from, to, found.get(`${from.at} ${to.at}`), usually)))))));
}

function cell(from, to, way, usually) {
  if (from.at === to.at) return el("td", { class: "self", "aria-label": "itself" }, "·");
  if (!way) return el("td", { class: "dim", title: `${from.id} has not tried ${to.id}` }, "–");
  const failed = way.failures ? `, ${plural(way.failures, "try", "tries")} failed since` : "";
  const title = way.median === null ? `${from.id} → ${to.id}: no try succeeded` : `${from.id} → ${to.id}: ${time(way.median)}, at least ${time(way.least)}, of ${plural(way.tries, "try", "tries")}${failed}`;
  return el("td", { class: tone(way, usually), title }, way.failures ? `✗ ${time(way.median)}` : time(way.median));
}
