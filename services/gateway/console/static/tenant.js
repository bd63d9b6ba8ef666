// One tenant: its API keys and its limits, and for who may act: make a key, revoke one, set limits.

import { asked, dialog, say, send } from "./acts.js";
import { el, put } from "./dom.js";
import { count, day } from "./format.js";
import { badge } from "./parts.js";
import { poll } from "./poll.js";
import { plain, table } from "./table.js";

const SCOPES = [
  ["inference", "completions and the list of models"], ["batches", "files and batches"], ["usage", "what the tenant used"],
  ["metrics", "the gateway's /metrics, which are about all tenants together"],
];
const DAY_S = 86_400;
const ENDS = [["in 30 days", 30], ["in 90 days", 90], ["in a year", 365], ["never", 0]];
const LIMITS = [
  ["requests_per_minute", "requests in a minute"], ["tokens_per_minute", "tokens in a minute"], ["requests_under_way", "requests under way"],
  ["tokens_under_way", "tokens under way"], ["money_per_month", "money in a month (UTC)"], ["priority", "priority"],
];
const PRIORITY_MAX = 4;

export function tenant(root, go, name, { took, ended, acts }) {
  const note = el("div");
  const limits = el("div", { class: "panel" });
  let found = null;
  const revoke = (row) => dialog(row, [["Revoke it", "key revoke",
    "Whoever uses it gets 401 from now on at this gateway, and within two seconds at others. Answers under way end. It cannot be taken back."]],
    `Key ${row.id}`, async () => { const body = await send("DELETE", `/console/keys/${row.id}`); again(); return body; });
  const list = table({
    label: "API keys", noun: ["key", "keys"], empty: "This tenant has no key that was made here. Its tenant token and keys of the key file are not listed.",
    key: (row) => row.id,
    columns: [
      { name: "id", value: (row) => row.id, cell: (row) => el("code", null, row.id), title: "the second part of the key's text" },
      { name: "name", value: (row) => row.name, cell: (row) => el("span", { class: "name", title: row.name }, row.name || "–") },
      { name: "state", value: (row) => row.state, cell: (row) => badge(row.state) },
      ...(acts ? [{ name: "act", value: () => null, cell: (row) => (row.state !== "valid" ? ""
        : el("button", { type: "button", class: "quiet act", "aria-label": `Revoke key ${row.id}`, onclick: () => revoke(row) }, "revoke …")) }] : []),
      { name: "scopes", value: (row) => row.scopes.join(" ") },
      { name: "made", value: (row) => row.created_unix_s, cell: (row) => day(row.created_unix_s), title: "day in UTC" },
      { name: "ends", value: (row) => end(row) || Infinity, cell: (row) => (end(row) ? day(end(row)) : "never"), title: "day in UTC" },
      { name: "limits", wide: true, value: limitsText, cell: (row) => el("span", { class: "name", title: limitsText(row) }, limitsText(row)) },
      { name: "made by", wide: true, value: (row) => row.created_by, cell: (row) => el("span", { class: "name", title: row.created_by }, row.created_by) },
    ],
  });
  put(root,
    el("div", { class: "heading" }, el("h1", null, "Tenant ", el("span", { class: "name", title: name }, name)),
      acts ? el("button", { type: "button", class: "main", onclick: () => keyDialog(name, () => again()) }, "Make a key …") : null),
    note, list.node, limits);
  const failed = (text) => put(note, el("p", { class: "note bad", role: "alert" }, text));
  const answers = poll(`/console/keys?tenant=${encodeURIComponent(name)}`, { took, ended, failed });
  const again = () => answers.again();
  return {
    topic: null,
    filter: list.filter,
    take(document) {
      if (JSON.stringify(document.limits) !== JSON.stringify(found)) { // what is being looked at stays as it is
        found = document.limits;
        put(limits, limitPanel(name, found, acts, again));
      }
      put(note);
      list.show(document.keys);
    },
    close() {
      answers.close();
      list.close();
    },
  };
}

function end(row) {
  return row.revoked_unix_s || row.expires_unix_s;
}

function limitsText(row) {
  return LIMITS.filter(([name]) => row.limits[name]).map(([name, text]) => (name === "priority" ? `${text} ${row.limits[name]}` : `${count(row.limits[name])} ${text}`)).join(", ") || "of the tenant";
}

function limitPanel(name, limits, acts, again) {
  return [
    el("div", { class: "heading" }, el("h2", null, "Limits of the tenant, over all gateways"),
      acts ? el("button", { type: "button", onclick: () => limitDialog(name, limits, again) }, "Set limits …") : null),
    plain("Limits of the tenant", ["what", ["limit"]], LIMITS.map(([field, text]) => [text, limitText(field, limits[field])])),
  ];
}

function limitText(name, value) {
  if (name === "priority") return value ? `${value} (0 is normal)` : "0, which is normal";
  return value ? count(value) : "as the gateway's setting says";
}

function limitInput(name, value) {
  const step = name === "priority" || name.endsWith("_under_way") ? "1" : "any";
  const range = name === "priority" ? { min: String(-PRIORITY_MAX), max: String(PRIORITY_MAX) } : { min: "0" };
  return el("input", { type: "number", ...range, step, value: String(value ?? 0), required: true });
}

function form(title, parts, label, work) {
  const said = el("p", { role: "status" });
  const main = el("button", { type: "submit", class: "main" }, label);
  const close = el("button", { type: "button", class: "quiet", onclick: () => box.close() }, "Close");
  const fields = el("form", { class: "fields", onsubmit: submit }, parts, said, el("div", { class: "find" }, main, close));
  const box = el("dialog", { class: "panel", "aria-labelledby": "form-title", onclose: () => box.remove() }, el("h2", { id: "form-title" }, title), fields);

  async function submit(event) {
    event.preventDefault();
    const body = await asked(said, [main], close, () => work(fields));
    if (body) close.focus();
  }

  document.body.append(box);
  box.showModal();
  return said;
}

function field(text, input) {
  return el("label", { class: "field" }, el("span", null, text), input);
}

function keyDialog(name, again) {
  const label = el("input", { type: "text", maxlength: 64, autocomplete: "off", placeholder: "ci" });
  const scopes = SCOPES.map(([scope, text]) => [scope, el("input", { type: "checkbox", checked: scope === "inference" }), text]);
  const ends = el("select", null, ENDS.map(([text, days]) => el("option", { value: String(days), selected: days === 90 }, text)));
  const said = form(`A key of ${name}`, [
    field("Name, for people", label),
    el("fieldset", null, el("legend", null, "What it is for"),
      scopes.map(([scope, box, text]) => el("label", { class: "check" }, box, el("span", null, el("strong", null, scope), ` ${text}`)))),
    field("It ends", ends),
  ], "Make it", async (fields) => {
    const days = Number(ends.value);
    const body = await send("POST", "/console/keys", {
      tenant: name, name: label.value.trim(), scopes: scopes.filter(([, box]) => box.checked).map(([scope]) => scope),
      expires_unix_s: days ? Math.floor(Date.now() / 1000) + days * DAY_S : 0,
    });
    for (const each of fields.querySelectorAll("label, fieldset, button[type=submit]")) each.hidden = true;
    say(said, body, "Copy the key now: it is not shown again.");
    said.after(el("input", { type: "text", readonly: true, class: "secret", value: body.key, "aria-label": "The new key", onfocus: (event) => event.target.select() }));
    again();
    return body;
  });
}

function limitDialog(name, limits, again) {
  const inputs = LIMITS.map(([each, text]) => [each, field(text, limitInput(each, limits[each]))]);
  const said = form(`Limits of ${name}`, [el("p", { class: "dim" }, "0 is no limit of its own, and the normal priority (-4 to 4, more goes first). They hold over all gateways, within two seconds."), inputs.map(([, node]) => node)],
    "Set them", async () => {
      const given = inputs.map(([each, node]) => [each, Number(node.querySelector("input").value)]);
      const values = Object.fromEntries(given.filter(([each, value]) => value !== (limits[each] ?? 0))); // others may have set the rest meanwhile
      if (!Object.keys(values).length) throw new Error("Nothing is different from what was set.");
      const body = await send("PUT", "/console/limits", { tenant: name, ...values });
      say(said, body, "They are in force at this gateway.");
      again();
      return body;
    });
}
