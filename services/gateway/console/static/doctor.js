// What `mooncache doctor` finds, run by the gateway: what is wrong in full with what to do, then every check.

import { el, put } from "./dom.js";
import { clock, count, duration, plural } from "./format.js";
import { badge, tile } from "./parts.js";
import { poll } from "./poll.js";
import { table } from "./table.js";

const SLOW_MS = 10_000;
const FAST_MS = 500; // while it runs
const ORDER = ["fail", "warn", "pass", "skipped"];
const TROUBLE_MAX = 40;

export function doctor(root, go, { took, ended, acts }) {
  let running = false;
  const button = el("button", { type: "button", class: "main", onclick: begin }, "Check now");
  const state = el("p", { role: "status", class: "dim" });
  const bar = el("progress", { "aria-label": "Parts that have answered", hidden: true });
  const note = el("div", { class: "stack" });
  const figures = el("section", { class: "tiles", "aria-label": "Figures" });
  const trouble = el("section", { class: "panel", "aria-labelledby": "trouble-title", hidden: true });
  const list = table({
    label: "Checks", noun: ["check", "checks"], empty: "Nothing has been checked yet.",
    key: (row) => row.at,
    columns: [
      { name: "result", value: (row) => ORDER.indexOf(row.status), cell: (row) => badge(row.status) },
      { name: "group", wide: true, value: (row) => row.group },
      { name: "check", value: (row) => row.check },
      { name: "of", value: (row) => row.subject, cell: (row) => el("span", { class: "name", title: row.subject }, row.subject) },
      { name: "why", value: (row) => row.why, cell: (row) => el("span", { class: "name long", title: row.why }, row.why) },
      { name: "what to do", wide: true, value: (row) => row.fix, cell: (row) => el("span", { class: "name long", title: row.fix }, row.fix) },
    ],
  });
  put(root,
    el("div", { class: "heading" }, el("h1", null, "Doctor"), acts ? button : null),
    el("p", { class: "dim" }, "The checks of mooncache doctor, from the host of this gateway. It asks every process, writes a small block to each node and reads it back, and has the engines read one short prompt."),
    note, state, bar, figures, trouble, list.node);
  const asked = poll("/console/doctor", { took, ended, failed: fault, every: () => (running ? FAST_MS : SLOW_MS) });

  function fault(said) {
    put(note, said ? el("p", { class: "note bad", role: "alert" }, said) : null);
  }

  async function begin() {
    button.disabled = true;
    try {
      const answer = await fetch("/console/doctor", { method: "POST", headers: { "content-type": "application/json" }, body: "{}" });
      const body = await answer.json();
      if (answer.status === 401) return ended();
      if (!answer.ok) throw new Error(body?.error?.message ?? `The answer was ${answer.status}.`);
      took(body);
      asked.again();
    } catch (error) {
      fault(error instanceof TypeError ? "The gateway does not answer." : error.message);
      button.disabled = false;
    }
  }

  return {
    topic: null,
    filter: list.filter,
    take(document) {
      running = document.running;
      button.disabled = running;
      fault(document.error);
      put(state, progress(document, acts));
      const over = document.steps.filter((step) => step.is_over).length;
      bar.hidden = !running;
      bar.max = Math.max(1, document.steps.length);
      bar.value = over;
      put(figures, document.counts ? tiles(document.counts) : null);
      const wrong = document.checks.filter((row) => row.status === "fail" || row.status === "warn");
      trouble.hidden = !wrong.length;
      put(trouble, el("h2", { id: "trouble-title" }, "What to look at"), el("ul", { class: "findings" }, wrong.slice(0, TROUBLE_MAX).map(finding)),
        wrong.length > TROUBLE_MAX ? el("p", { class: "dim" }, `The table has ${wrong.length - TROUBLE_MAX} more.`) : null);
      list.show(document.checks.map((row, at) => ({ ...row, at })));
    },
    close() {
      asked.close();
      list.close();
    },
  };
}

function progress(document, acts) {
  if (document.running) {
    const open = document.steps.filter((step) => !step.is_over).map((step) => step.part);
    return `Looking … ${open.length ? `asking: ${open.join(", ")}` : `since ${clock(document.began_s)}`}`;
  }
  if (!document.counts) return acts ? "It has not run here yet." : "It has not run here yet. Whoever signs in with the cluster token may start it.";
  return `${clock(document.ended_s)}: took ${duration(document.elapsed_s)}${document.left_out ? `; ${plural(document.left_out, "result is", "results are")} not shown` : ""}`;
}

function tiles(counts) {
  return [
    tile("Failed", count(counts.fail), "does not work, or soon will not", counts.fail ? "bad" : ""),
    tile("To look at", count(counts.warn), "works, but not as well or as safely as it could", counts.warn ? "busy" : ""),
    tile("Passed", count(counts.pass), "", counts.fail || counts.warn ? "" : "good"),
    tile("Skipped", count(counts.skipped), "there was nothing to look at, or it could not be looked at"),
  ];
}

function finding(row) {
  return el("li", null, badge(row.status), el("div", null,
    el("strong", null, `${row.check}, ${row.subject}: `), commands(row.why), row.fix ? el("p", { class: "dim" }, "→ ", commands(row.fix)) : null));
}

/** A sentence with its commands, which stand between backticks, as code. */
function commands(text) {
  return text.split("`").map((part, at) => (at % 2 ? el("code", null, part) : part));
}
