// How the cluster does: promises, cache, load and what is wrong, over the last quarter of an hour.

import { chart, meter } from "./charts.js";
import { el, put } from "./dom.js";
import { bytes, clock, count, duration, money, ms, percent, plural } from "./format.js";
import { badge, silence, tile } from "./parts.js";
import { plain } from "./table.js";

const INCIDENTS_SHOWN = 12;
const SPACES = { dram: "DRAM", ssd: "SSD" };
const PAGES_OF = { instance: "#/instances", node: "#/pool" };
const OF_UNLIMITED = "Blocks of prompts that the pool had, over those that it would have with unlimited memory: since its nodes were started, estimated from a sample. Below 100 %, more memory or disks would find more. The page of the pool shows it by node.";

export function overview(root) {
  put(root, el("h1", null, "Overview"), el("p", { class: "dim" }, "Waiting for the first look …"));
  return { topic: "overview", take: (document) => draw(root, document), close() {} };
}

function draw(root, document) {
  put(root, heading(document), silence(document), tiles(document), paybacks(document), holes(document), charts(document), lists(document), incidents(document));
}

function heading(document) {
  const conductor = document.conductor;
  const facts = [`gateway ${document.gateway}`];
  if (conductor) {
    facts.push(`policy ${conductor.policy}`, conductor.admission ? "admission on" : "admission off",
      `conductor up ${duration(conductor.uptime_s)}`, plural(conductor.gateways, "gateway", "gateways"));
  }
  return el("div", { class: "heading" },
    el("div", null, el("h1", null, "Overview"),
      el("p", { class: "dim" }, `Requests of the last ${duration(document.window_s)}${document.skipped ? " (there were more than a look reads; shares are of those that were read)" : ""}`)),
    el("p", { class: "dim facts" }, facts.join(" · ")));
}

function tiles(document) {
  const f = document.figures;
  const broken = (f.states.refused ?? 0) + (f.states.failed ?? 0);
  const running = document.conductor?.active ?? f.states.running ?? 0;
  return el("section", { class: "tiles", "aria-label": "Figures" },
    tile("Promises kept", percent(f.kept_share), f.judged ? `of ${plural(f.judged, "request", "requests")} with a promise` : "no request to judge yet",
      f.kept_share === null ? "" : f.kept_share >= 0.99 ? "good" : f.kept_share >= 0.9 ? "busy" : "bad"),
    tile("Hit ratio", percent(f.hit_share), `${count(f.cached_tokens)} of ${count(f.prompt_tokens)} prompt tokens`),
    ofUnlimited(document.pool),
    tile("Tokens not computed", count(f.cached_tokens), saved(f.saved_s)),
    document.currency === null || document.currency === undefined ? null
      : tile("Money spent", money(f.cost, document.currency), f.saved_cost === null ? "what caches saved is not known yet" : `caches saved ${money(f.saved_cost, document.currency)}`),
    tile("Requests", count(f.requests), `${count(running)} running${broken ? `, ${count(broken)} refused or failed` : ""}`),
    tile("First token", ms(f.ttft_p50_ms), `median; 95 of 100 within ${ms(f.ttft_p95_ms)}`),
    tile("Between tokens", ms(f.tbt_p50_ms), `median; 95 of 100 within ${ms(f.tbt_p95_ms)}`));
}

/** How much of what memory can give the pool gives. */
function ofUnlimited(sums) {
  const share = sums?.hits_of_unlimited ?? null;
  return tile("Hits of max", percent(share), share === null ? "not known, or no chain of blocks was asked for yet" : [meter(share, "", { plain: true }), " of an unlimited pool's hits"], "", OF_UNLIMITED);
}

/** What the price book leaves out, so that a small sum does not pass for a whole one. */
function holes(document) {
  return document.price_holes?.length ? el("p", { class: "dim" }, `Price book: ${document.price_holes.join("; ")}.`) : null;
}

/** Whether memory and disks of the pool pay for themselves. */
function paybacks(document) {
  const sum = (value) => money(value, document.currency);
  return (document.paybacks ?? []).map((row) => {
    const size = `${bytes(row.size_bytes)} of ${SPACES[row.kind] ?? row.kind}`;
    return el("p", { class: "dim" }, row.ratio === null ? `${size} cost nothing of their own: the price of the machines covers them.`
      : `${size} cost ${sum(row.cost_per_month)} a month and save ${sum(row.saved_per_month)} (${percent(row.ratio)} of their price), if every hour is like the last ${duration(document.window_s)}.`);
  });
}

/** Time of engines that caches saved; below 0 they took longer than computing was expected to. */
function saved(seconds) {
  if (seconds === null) return "time saved is not known yet";
  return seconds < 0 ? `caches took ${duration(-seconds)} longer than computing` : `${duration(seconds)} of engines saved`;
}

function charts(document) {
  const points = document.series.map((step) => step.at_s);
  const pick = (name) => document.series.map((step) => step[name] ?? null);
  const step = document.series.length > 1 ? duration(document.series[1].at_s - document.series[0].at_s) : "";
  return el("section", { class: "plots", "aria-label": "Over time" },
    chart({ title: `Requests in ${step}`, points, bars: true, format: count,
      lines: [{ name: "made", values: pick("requests"), tone: "a" }, { name: "refused", values: pick("refused"), tone: "bad" }] }),
    chart({ title: "Hit ratio", points, max: 1, format: percent, lines: [{ name: "tokens", values: pick("hit_share"), tone: "b" }] }),
    chart({ title: "First token", points, format: ms,
      lines: [{ name: "95 of 100", values: pick("ttft_p95_ms"), tone: "c" }, { name: "median", values: pick("ttft_p50_ms"), tone: "a" }] }),
    chart({ title: "Promises kept", points, max: 1, format: percent, lines: [{ name: "requests", values: pick("kept_share"), tone: "good" }] }));
}

function lists(document) {
  return el("section", { class: "halves" },
    el("div", { class: "panel" }, el("h2", null, "Instances"), states(document.instances), trouble(document.troubled, "#/instances")),
    el("div", { class: "panel" }, el("h2", null, "Pool"), pool(document), trouble(document.troubled_nodes, "#/pool")));
}

/** What was not well, since this gateway was started: what goes on comes first. */
function incidents(document) {
  const rows = document.incidents ?? [];
  const name = (row) => el("span", { class: "name", title: row.name }, PAGES_OF[row.kind] ? el("a", { href: PAGES_OF[row.kind] }, row.name) : row.name);
  const end = (row) => (row.until_s === null ? badge("goes on") : `${moment(row.until_s, document.at_s)}${row.gone ? ", no longer listed" : ""}`);
  return el("section", { class: "panel", "aria-label": "Incidents" }, el("h2", null, "Incidents"),
    rows.length ? plain("Incidents", ["since", "until", ["for"], "what", "name", "state", "why"], rows.slice(0, INCIDENTS_SHOWN).map((row) => [
      moment(row.since_s, document.at_s), end(row), duration((row.until_s ?? document.at_s) - row.since_s), row.kind, name(row), badge(row.state),
      el("span", { class: "name long", title: row.reason }, row.reason || "–")])) : null,
    el("p", { class: "dim" }, rows.length > INCIDENTS_SHOWN ? `${rows.length - INCIDENTS_SHOWN} more are not shown. ` : rows.length ? "" : "None. ",
      `This gateway has looked since ${moment(document.incidents_since_s, document.at_s)}.`));
}

/** The time of day, with the day when that is not today. */
function moment(unixS, nowS) {
  const day = new Date(unixS * 1000).toDateString();
  return day === new Date(nowS * 1000).toDateString() ? clock(unixS) : `${day.slice(4, 10)} ${clock(unixS)}`;
}

function states(counts) {
  if (!counts) return el("p", { class: "dim" }, "not known");
  if (!counts.count) return el("p", { class: "dim" }, "No instance is registered: start a worker.");
  return el("ul", { class: "counts" },
    Object.entries(counts.state).map(([state, number]) => el("li", null, badge(state), ` ${number.toLocaleString("en")}`)),
    Object.entries(counts.role ?? {}).map(([role, number]) => el("li", { class: "dim" }, `${role} ${number.toLocaleString("en")}`)));
}

function pool(document) {
  const sums = document.pool;
  if (!sums) return el("p", { class: "dim" }, "not known");
  const share = sums.capacity_bytes ? sums.used_bytes / sums.capacity_bytes : null;
  return el("div", null,
    meter(share, `${bytes(sums.used_bytes)} of ${bytes(sums.capacity_bytes)} of memory`),
    el("p", { class: "dim" }, `${count(sums.blocks)} blocks · master ${sums.master}${sums.complete ? "" : " · the directory is still being rebuilt"}`),
    states(document.nodes));
}

function trouble(rows, where) {
  if (!rows.length) return null;
  return el("ul", { class: "trouble" }, rows.map((row) => el("li", null, badge(row.state), " ", el("a", { href: where }, row.id), row.reason ? ` ${row.reason}` : "")));
}
