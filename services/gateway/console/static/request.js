// One request: where its time went, who was asked, why it went there, and what another policy would have done.

import { el, put } from "./dom.js";
import { DASH, count, money, ms, percent } from "./format.js";
import { badge, tile } from "./parts.js";
import { plain } from "./table.js";
import { DIFFERENCES, GIVEN_UP, INLINING, PARTS, PHASES, REASONS } from "./words.js";

const ROOM = 1.15; // of the line behind the last part that is not decoding

export function request(root, go, name, policies) {
  let policy = "";
  let stopped = false;
  let timer = 0;
  const content = el("div", { class: "request" });
  const status = el("p", { class: "dim", role: "status" }, "Loading …");
  put(root, el("p", null, el("a", { href: "#/requests" }, "← all requests")), status, content);

  async function load() {
    clearTimeout(timer);
    const query = new URLSearchParams({ id: name, policy });
    let answer;
    let record;
    try {
      answer = await fetch(`/console/decision?${query}`);
      record = await answer.json();
    } catch {
      put(status, "The gateway does not answer; trying again.");
      if (!stopped) timer = setTimeout(load, 3000);
      return;
    }
    if (stopped) return;
    if (answer.status === 401) return go("#/signin");
    if (!answer.ok) {
      put(status, record?.error?.message ?? `The answer was ${answer.status}.`);
      return;
    }
    put(status);
    draw(record);
    if (record.state === "running") timer = setTimeout(load, 2000);
  }

  function draw(record) {
    const focused = document.activeElement?.id === "policy";
    const observed = record.observed ?? {};
    put(content,
      el("div", { class: "heading" },
        el("h1", null, "Request ", el("span", { class: "name", title: record.request_id }, record.request_id)), badge(record.state)),
      el("p", null, record.message),
      el("p", { class: "dim" }, facts(record).join(" · ")),
      tiles(record, observed),
      timeLine(record),
      times(record, observed),
      costs(record.cost),
      candidates(record),
      whatIf(record),
      misses(record),
      differences(observed),
      events(record),
      el("details", { class: "panel" }, el("summary", null, "The record as JSON"), el("pre", { tabindex: "0" }, JSON.stringify({ ...record, cost: undefined }, null, 2))));
    if (focused) document.getElementById("policy")?.focus();
  }

  function whatIf(record) {
    const other = record.what_if;
    const choice = el("select", { id: "policy", onchange: () => { policy = choice.value; load(); } },
      el("option", { value: "" }, "choose a policy"),
      policies.map((each) => el("option", { value: each, selected: each === policy }, each)));
    const said = [];
    if (other && !other.known) said.push(el("p", null, other.message));
    if (other?.known) {
      said.push(el("p", null, el("strong", null, other.same ? "The same decision: " : "Another decision: "), other.message));
      if (other.expected && record.expected) {
        said.push(plain("The other policy's times", ["", ["expected here"], ["expected there"]], [
          ["first token", ms(record.expected.ttft_ms), ms(other.expected.ttft_ms)],
          ["between tokens", ms(record.expected.tbt_ms), ms(other.expected.tbt_ms)],
        ]));
      }
    }
    return section("What another policy would have done", el("label", null, "Policy ", choice), said);
  }

  load();
  return { topic: null, take() {}, close() { stopped = true; clearTimeout(timer); } };
}

function section(title, ...children) {
  return el("section", { class: "panel" }, el("h2", null, title), children);
}

function facts(record) {
  const found = [`decision ${record.decision_id}`, `model ${record.model}`, `tenant ${record.tenant}`];
  if (record.attempt > 1) found.push(`attempt ${record.attempt}`);
  if (record.session) found.push(`session ${record.session}`);
  if (record.pool) found.push(`pool ${record.pool.state}, ${count(record.pool.tokens)} tokens found in ${ms(record.pool.lookup_ms)}`);
  if (record.chosen?.store_node) found.push(`handed over through ${record.chosen.store_node}`);
  return found;
}

function tiles(record, observed) {
  const cached = (record.events ?? []).findLast((event) => (event.cached_tokens ?? -1) >= 0)?.cached_tokens
    ?? (observed.computed_tokens === undefined ? null : Math.max(0, record.prompt_tokens - observed.computed_tokens));
  const promised = record.promised ?? {};
  return el("div", { class: "tiles" },
    tile("First token", observed.streamed === false ? DASH : ms(observed.ttft_ms), observed.streamed === false ? "not streamed" : promised.ttft_ms ? `promised ${ms(promised.ttft_ms)}` : "nothing promised"),
    tile("Between tokens", ms(observed.tbt_ms), promised.tbt_ms ? `promised ${ms(promised.tbt_ms)}` : "nothing promised"),
    tile("Whole", ms(observed.total_ms), `${count(observed.output_tokens)} output tokens`),
    tile("From caches", cached === null || !record.prompt_tokens ? DASH : percent(cached / record.prompt_tokens), `${count(cached)} of ${count(record.prompt_tokens)} prompt tokens`),
    record.cost ? tile("Cost", money(record.cost.total, record.cost.currency), savings(record.cost)) : null);
}

function timeLine(record) {
  const spans = record.spans ?? [];
  if (!spans.length) return section("Where the time went", el("p", { class: "dim" }, "No leg of this request was reported yet."));
  const whole = Math.max(...spans.map((span) => span.to_ms));
  const before = Math.max(0, ...spans.filter((span) => span.part !== "generate").map((span) => span.to_ms));
  const end = Math.max(1e-3, Math.min(whole, (before || whole) * ROOM));
  const share = (value) => `${((Math.min(value, end) / end) * 100).toFixed(3)}%`;
  const step = roundStep(end / 5);
  const ticks = [];
  for (let at = 0; at <= end * 0.94; at += step) ticks.push(el("span", { class: "tick", style: { left: share(at) } }, at ? at.toLocaleString("en") : "0 ms"));
  let last = "";
  const rows = spans.map((span) => {
    const leg = `${span.leg} ${span.instance}`.trim();
    const more = span.to_ms > end * (1 + 1e-9);
    const row = el("div", { class: "lane", role: "listitem" },
      el("span", { class: "leg", title: leg }, leg === last ? "" : leg),
      el("span", { class: "part" }, PARTS[span.part] ?? span.part),
      el("span", { class: "track" }, el("span", {
        class: `span ${Object.hasOwn(PARTS, span.part) ? span.part : "unknown"}${more ? " more" : ""}`,
        style: { left: share(span.from_ms), width: `max(3px, calc(${share(span.to_ms)} - ${share(span.from_ms)}))` },
      })),
      el("span", { class: "took" }, ms(span.to_ms - span.from_ms)));
    last = leg;
    return row;
  });
  return section("Where the time went",
    el("div", { class: "lanes", role: "list" }, el("div", { class: "lane ticks", "aria-hidden": "true" }, el("span"), el("span"), el("span", { class: "track" }, ticks), el("span")), rows),
    whole > end * (1 + 1e-9) ? el("p", { class: "dim" }, `The line ends a little after the first token; decoding went on until ${ms(whole)}.`) : null);
}

function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * (1 - 1e-9));
}

function times(record, observed) {
  const expected = record.expected;
  if (!expected) return null;
  const promised = record.promised ?? {};
  const generating = expected.tbt_ms * Math.max(0, (record.expected_output_tokens ?? 1) - 1);
  return section("Times", plain("Times", ["", ["promised"], ["expected"], ["observed"]], [
    ["first token", ms(promised.ttft_ms), ms(expected.ttft_ms), ms(observed.ttft_ms)],
    ["between tokens", ms(promised.tbt_ms), ms(expected.tbt_ms), ms(observed.tbt_ms)],
    ["waiting before the prefill", "", ms(expected.queue_ms), ms(observed.queue_ms)],
    ["waiting and loading", "", ms(expected.ready_ms), ms(observed.ready_ms)],
    ["prefill", "", ms(expected.prefill_ms), ms(observed.prefill_ms)],
    ["hand-over to decode", "", ms(expected.handover_ms), ms(observed.handover_ms)],
    ["decode", "", ms(generating), ms(observed.decode_ms)],
    ["whole request", "", "", ms(observed.total_ms)],
  ]));
}

function savings(cost) {
  return cost.saved ? `caches saved ${money(cost.saved.total, cost.currency)}` : "what caches saved is not known";
}

/** What the request cost and what caches saved of it, in parts; there is none without a price book and before its end. */
function costs(cost) {
  if (!cost) return null;
  const rows = [["computing the prompt", cost.computing], ["generating", cost.generating], ["network", cost.network], ["sum", cost.total]];
  if (cost.saved) {
    rows.push(["saved by engines' own caches", cost.saved.engine], ["saved by memory of the pool", cost.saved.dram], ["saved by disks of the pool", cost.saved.ssd]);
  }
  return section("What it cost", plain("Costs", ["", [cost.currency]], rows.map(([what, value]) => [what, money(value, "").trim()])),
    cost.remarks.length ? el("p", { class: "dim" }, `${cost.remarks.join("; ")}.`) : null);
}

function marked(rows) {
  return rows.map(([chosen, ...cells]) => Object.assign(cells, { chosen }));
}

function candidates(record) {
  const chosen = record.chosen ?? { prefill: "", decode: "" };
  const prefiller = chosen.prefill || chosen.decode;
  const asked = [...(record.prefill_candidates ?? []), ...(record.inline_candidates ?? [])];
  const prefill = asked.map((item) => {
    const price = (kind) => item.branches.find((branch) => branch.kind === kind);
    return [item.instance_id === prefiller, name(item.instance_id, item.instance_id === prefiller), item.role, count(item.local_tokens),
      count(price("fetch")?.fetch_tokens ?? 0), count(price("wait")?.prefix_tokens ?? 0), ms(item.queue_ms),
      ms(price("local")?.total_ms), ms(price("fetch")?.total_ms), ms(price("wait")?.total_ms), item.best];
  });
  const decode = (record.decode_candidates ?? []).map((item) => [item.instance_id === chosen.decode, name(item.instance_id, item.instance_id === chosen.decode),
    item.role, count(item.local_tokens), count(item.sequences), ms(item.tbt_ms), ms(item.wait_ms), ms(item.handover_ms), ms(item.score_ms)]);
  const more = (record.candidate_count ?? 0) - asked.length;
  const verdict = INLINING[chosen.inlining?.verdict];
  if (!prefill.length && !decode.length) return section("Candidates", el("p", { class: "dim" }, "No instance was priced for this request."));
  return section("Candidates",
    verdict ? el("p", null, verdict) : null,
    prefill.length ? [el("h3", null, "For the prompt"), plain("Candidates for the prompt",
      ["instance", "role", ["own hits"], ["pool hits"], ["awaited"], ["queue"], ["local"], ["fetch"], ["wait"], "best"], marked(prefill))] : null,
    more > 0 ? el("p", { class: "dim" }, `${more.toLocaleString("en")} more expensive ones were not recorded.`) : null,
    decode.length ? [el("h3", null, "For the answer"), plain("Candidates for the answer",
      ["instance", "role", ["own hits"], ["sequences"], ["a token"], ["wait"], ["hand-over"], ["to the end"]], marked(decode))] : null);
}

function name(text, chosen) {
  return el("span", { class: "name", title: text }, chosen ? el("strong", null, `→ ${text}`) : text);
}

function misses(record) {
  const rows = record.misses ?? [];
  if (!rows.length) return null;
  return section("Prompt tokens that had to be computed",
    plain("Misses", ["tokens", ["number"], "why"], rows.map((miss) => [`${miss.from_token}–${miss.to_token}`, count(miss.to_token - miss.from_token), REASONS[miss.reason] ?? miss.reason])));
}

function differences(observed) {
  const rows = (observed.differences ?? []).map((each) => {
    const timed = "planned_ms" in each;
    const say = (value) => (timed ? ms(value) : `${count(value)} tokens`);
    return [DIFFERENCES[each.kind] ?? each.kind, each.leg, say(each[timed ? "planned_ms" : "planned_tokens"]), say(each[timed ? "actual_ms" : "actual_tokens"]),
      (REASONS[each.reason] ?? each.reason).split(":")[0]];
  });
  const lost = (observed.given_up ?? []).map((each) => el("p", null, `${each.to_block - each.from_block} blocks were given up, and the waits for them ended: ${GIVEN_UP[each.reason] ?? each.reason}.`));
  if (!rows.length && !lost.length) return null;
  return section("Different from the plan", rows.length ? plain("Differences", ["what", "leg", ["planned"], ["observed"], "why"], rows) : null, lost);
}

function events(record) {
  const rows = [];
  for (const event of record.events ?? []) {
    rows.push([event.elapsed_ms, PHASES[event.phase] ?? event.phase]);
    for (const leg of event.legs ?? []) {
      if (leg.sent_ms > 0) rows.push([leg.sent_ms, `${leg.leg} leg to ${leg.instance} sent`]);
      if (leg.ended_ms > 0) rows.push([leg.ended_ms, `${leg.leg} leg to ${leg.instance} ended ${leg.code}`]);
    }
  }
  if (!rows.length) return null;
  const unique = new Map(rows.map((row) => [row.join("\0"), row]));
  const ordered = [...unique.values()].sort((one, other) => one[0] - other[0]);
  return section("Reported", plain("Reports", [["after"], "what"], ordered.map(([at, what]) => [ms(at), what])));
}
