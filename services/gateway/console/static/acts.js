// What an operator may change: one dialog that says what an act does before it is done, and what came of it.

import { el, put } from "./dom.js";
import { badge } from "./parts.js";

const PATIENCE_MS = 30_000;
const ROLES = ["prefill", "decode", "both"];

/** The column with a button in each row, in a list of one; no column for who only looks. */
export function actColumn(acts, open) {
  if (!acts) return [];
  const button = (row) => el("button", { type: "button", class: "quiet act", "aria-label": `Change ${row.id}`, onclick: () => open(row) }, "change …");
  return [{ name: "act", value: () => null, cell: button }];
}

export function instanceDialog(row) {
  const away = row.state === "draining";
  dialog(row, [
    away ? ["Send requests to it again", "instance undrain", "It gets new requests from now on."]
      : ["Drain it", "instance drain", "It gets no new requests and finishes those that it has. Its process goes on."],
    ...ROLES.filter((role) => role !== row.role).map((role) => [`Make its role ${role}`, "instance role", roleText(role), { role }]),
  ]);
}

export function nodeDialog(row) {
  dialog(row, [
    row.state === "draining" ? ["Take it back", "drain --cancel", "The drain ends, and the node takes new blocks again."]
      : ["Drain it", "drain", "It takes no new blocks, and blocks that only it holds are copied to other nodes. The table of tasks shows how far it is."],
  ]);
}

export function prefixDialog(row) {
  dialog({ ...row, state: "" }, [
    ["Make another copy", "prefix copy", `Its ${row.blocks} blocks are copied until each is on ${row.copies + 1} nodes. The page of the pool shows the task.`, { copies: row.copies + 1 }],
    ["Pin it for an hour", "prefix pin", "Its blocks are not evicted, however little they are read."],
    ["Evict it", "prefix evict", "Its blocks leave the pool, on all nodes and tiers. Prompts that begin so are computed again; what engines hold themselves stays."],
  ], `Prefix ${row.id}`);
}

function roleText(role) {
  return { prefill: "It computes prompts.", decode: "It generates tokens.", both: "It computes prompts and generates tokens." }[role];
}

/** choices: [text of a button, act, what it does, more of the question]. ask(act, more): sends it; the gateway's answer. */
export function dialog(row, choices, title = row.id, ask = (act, more) => send("POST", "/console/act", { act, name: row.id, ...more })) {
  const said = el("p", { role: "status" });
  const buttons = choices.map(([text, act, , more]) => el("button", { type: "button", class: "main", onclick: () => done(act, more) }, text));
  const close = el("button", { type: "button", class: "quiet", autofocus: true, onclick: () => box.close() }, "Close");
  const box = el("dialog", { class: "panel", "aria-labelledby": "act-title", onclose: () => box.remove() },
    el("h2", { id: "act-title" }, title, " ", row.state ? badge(row.state) : null),
    el("ul", { class: "choices" }, choices.map(([, , text], at) => el("li", null, buttons[at], el("span", { class: "dim" }, text)))),
    said, close);

  async function done(act, more) {
    const body = await asked(said, buttons, close, () => ask(act, more));
    if (!body) return;
    say(said, body, body.said || "The page shows it within a few seconds.");
    close.focus();
  }

  document.body.append(box);
  box.showModal();
}

/** Ask the gateway for an act; its answer. Throws what a person should read. */
export async function send(method, path, body = null) {
  const question = body === null ? {} : { headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(path, { method, signal: AbortSignal.timeout(PATIENCE_MS), ...question });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found?.error?.message ?? `The answer was ${answer.status}.`);
  return found;
}

/**
 * Send a question while its buttons are disabled; null when it failed, and `said` has why.
 * Its dialog stays open so long: the answer may be the only one, as with a new key.
 */
export async function asked(said, buttons, close, question) {
  for (const button of [...buttons, close]) button.disabled = true;
  addEventListener("keydown", stay, true);
  put(said, "Asking …");
  said.className = "dim";
  try {
    return await question();
  } catch (error) {
    said.className = "bad-text";
    put(said, error instanceof TypeError || error.name === "TimeoutError" ? "The gateway does not answer. It may have been done: look before you repeat it." : error.message);
    for (const button of buttons) button.disabled = false;
    return null;
  } finally {
    close.disabled = false;
    removeEventListener("keydown", stay, true);
  }
}

function stay(event) {
  if (event.key === "Escape") event.preventDefault();
}

/** What came of an act. */
export function say(said, body, text) {
  said.className = body.audited ? "good-text" : "bad-text";
  put(said, body.audited ? `Done. ${text}` : "Done, but the audit log of the gateway's host could not be written.");
}
