// Every engine as the conductor sees it.

import { actColumn, instanceDialog } from "./acts.js";
import { meter } from "./charts.js";
import { el, put } from "./dom.js";
import { count, duration, ms, percent } from "./format.js";
import { badge, silence } from "./parts.js";
import { table } from "./table.js";

export function instances(root, go, { acts }) {
  const note = el("div");
  const list = table({
    label: "Instances",
    noun: ["instance", "instances"],
    empty: "No instance is registered: start a worker.",
    key: (row) => row.id,
    columns: [
      { name: "instance", value: (row) => row.id, cell: (row) => el("span", { class: "name", title: row.id }, row.id) },
      { name: "state", value: (row) => row.state, cell: (row) => badge(row.state) },
      { name: "role", value: (row) => row.role },
      ...actColumn(acts, instanceDialog),
      { name: "KV memory", value: (row) => row.kv_share, cell: (row) => meter(row.kv_share, percent(row.kv_share)) },
      { name: "running", number: true, value: (row) => row.running, cell: (row) => count(row.running) },
      { name: "waiting", number: true, value: (row) => row.waiting, cell: (row) => count(row.waiting) },
      { name: "hits", number: true, value: (row) => row.hit_share, cell: (row) => percent(row.hit_share), title: "share of prompt tokens that its own cache or the pool had" },
      { name: "first token", number: true, value: (row) => row.ttft_ms, cell: (row) => ms(row.ttft_ms) },
      { name: "between tokens", number: true, value: (row) => row.tbt_ms, cell: (row) => ms(row.tbt_ms) },
      { name: "blocks", number: true, wide: true, value: (row) => row.blocks, cell: (row) => count(row.blocks) },
      { name: "heard", number: true, wide: true, value: (row) => row.age_s, cell: (row) => duration(row.age_s), title: "time since its last report" },
      { name: "model", wide: true, value: (row) => row.model, cell: (row) => el("span", { class: "name", title: row.model }, row.model) },
      { name: "engine", wide: true, value: (row) => row.engine, cell: (row) => el("span", { class: "name", title: row.engine }, row.engine) },
      { name: "remark", value: (row) => row.reason, cell: (row) => el("span", { class: "name long", title: row.reason }, row.reason) },
    ],
  });
  put(root, el("h1", null, "Instances"), note, list.node);
  return {
    topic: "instances",
    filter: list.filter,
    take(document) {
      put(note, silence(document));
      list.show(document.instances ?? []);
    },
    close: list.close,
  };
}
