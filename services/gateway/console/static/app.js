// The page: who is signed in, which page is open, and the one stream that feeds it.

import { configuration } from "./configuration.js";
import { doctor } from "./doctor.js";
import { el, put } from "./dom.js";
import { clock } from "./format.js";
import { instances } from "./instances.js";
import { listen } from "./live.js";
import { network } from "./network.js";
import { overview } from "./overview.js";
import { pool } from "./pool.js";
import { prefixes } from "./prefixes.js";
import { request } from "./request.js";
import { requests } from "./requests.js";
import { signIn } from "./signin.js";
import { tenant } from "./tenant.js";
import { tenants } from "./tenants.js";
import { usage } from "./usage.js";

const PAGES = [["overview", "Overview", overview], ["requests", "Requests", requests], ["pool", "Pool", pool], ["instances", "Instances", instances], ["prefixes", "Prefixes", prefixes], ["tenants", "Tenants", tenants],
  ["configuration", "Configuration", configuration], ["doctor", "Doctor", doctor], ["network", "Network", network]];
const TENANT_PAGES = [["usage", "Usage", usage]];
/** Pages of one thing: which page of the list they belong to. */
const PARENTS = { request: "requests", tenant: "tenants" };
const RENEW_MS = 5 * 60 * 1000;
const THEMES = ["auto", "light", "dark"];

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const link = document.getElementById("link");
const leave = document.getElementById("leave");
const themeButton = document.getElementById("theme");

let session = { signed_in: false, policies: [] };
let page = null;
let stream = null;

/** What there is to see for who is signed in; the gateway refuses the rest in any case. */
function pages() {
  return session.tenant ? TENANT_PAGES : PAGES;
}

function go(hash) {
  if (location.hash === hash) show();
  else location.hash = hash;
}

function show() {
  stream?.close();
  page?.close();
  stream = page = null;
  for (const box of document.querySelectorAll("dialog")) box.close(); // one may show a new key
  const [name, argument] = location.hash.replace(/^#\/?/, "").split("/");
  nav.hidden = leave.hidden = !session.signed_in;
  put(link);
  if (!session.signed_in) {
    document.title = "Sign in – Mooncache console";
    page = signIn(main, (said) => { session = said; go(wanted()); });
    return;
  }
  const there = pages();
  const found = there.find(([each]) => each === (PARENTS[name] ?? name)) ?? there[0];
  document.title = `${found[1]} – Mooncache console`;
  const focused = nav.contains(document.activeElement);
  put(nav, there.map(([each, title], at) => el("a", { href: `#/${each}`, "aria-current": each === found[0] ? "page" : null, title: `${title} (${at + 1})` }, title)));
  if (focused) nav.querySelector("[aria-current]").focus(); // whoever came here by Tab goes on from here
  main.scrollTop = 0;
  page = opened(found[2], session.tenant ? "" : name, decoded(argument ?? ""));
  if (!page.topic) return;
  stream = listen(page.topic, { take, state: say, ended: over });
}

/** The page of one request or tenant, or of a list. */
function opened(list, name, argument) {
  const more = { took: take, ended: over, acts: Boolean(session.acts) };
  if (name === "request") return request(main, go, argument, session.policies ?? []);
  return name === "tenant" && argument ? tenant(main, go, argument, more) : list(main, go, more);
}

let before = "";

/** Where to go after signing in: where one wanted to go before. */
function wanted() {
  const hash = before || location.hash;
  before = "";
  return hash && !hash.startsWith("#/signin") ? hash : "#/overview";
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

let seen = "";

function take(document) {
  seen = clock(document.at_s);
  say("live");
  page?.take(document);
}

function say(state) {
  link.className = `link ${state}`;
  put(link, state === "live" ? `live ${seen}` : seen ? `not connected; as of ${seen}` : "connecting …");
}

function over() {
  before = location.hash;
  session = { signed_in: false };
  show();
}

async function renew() {
  if (!session.signed_in || document.hidden) return;
  try {
    const said = await (await fetch("/console/session")).json();
    if (!said.signed_in) over();
  } catch {
    // The stream says that the gateway does not answer.
  }
}

function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  put(themeButton, { auto: "◐", light: "☀", dark: "☾" }[name]);
  themeButton.setAttribute("aria-label", `Colours: ${name === "auto" ? "as the system" : name}. Change`);
  themeButton.title = `Colours: ${name === "auto" ? "as the system" : name} (t)`;
  try {
    localStorage.setItem("mooncache.theme", name);
  } catch {
    // Private windows may keep nothing.
  }
}

function storedTheme() {
  try {
    const name = localStorage.getItem("mooncache.theme");
    return THEMES.includes(name) ? name : "auto";
  } catch {
    return "auto";
  }
}

function nextTheme() {
  theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % THEMES.length]);
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest?.("input,select,textarea");
  if (event.key === "Escape" && typing) typing.blur();
  if (typing || document.querySelector("dialog[open]")) return;
  const number = Number(event.key);
  if (session.signed_in && number >= 1 && number <= pages().length) go(`#/${pages()[number - 1][0]}`);
  else if (event.key === "/" && page?.filter) {
    event.preventDefault();
    page.filter.focus();
  } else if (event.key === "t") nextTheme();
  else if (event.key === "Escape") {
    const parent = PARENTS[location.hash.replace(/^#\/?/, "").split("/")[0]];
    if (parent && !session.tenant) go(`#/${parent}`);
  }
}

themeButton.addEventListener("click", nextTheme);
leave.addEventListener("click", async () => {
  try {
    await fetch("/console/session", { method: "DELETE" });
  } finally {
    session = { signed_in: false };
    show();
  }
});
addEventListener("hashchange", () => {
  if (location.hash === "#main") return;
  show();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says which page is open
  main.focus();
});
addEventListener("keydown", keys);
setInterval(renew, RENEW_MS);

theme(storedTheme());
try {
  session = await (await fetch("/console/session")).json();
} catch {
  put(main, el("p", { class: "note bad" }, "The gateway does not answer. Load the page again."));
}
show();
