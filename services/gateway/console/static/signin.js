// The way in: a key is shown once, in a header, and becomes a session that scripts cannot read.

import { el, put } from "./dom.js";

export function signIn(root, done) {
  const key = el("input", { id: "key", type: "password", autocomplete: "current-password", required: true, spellcheck: "false", maxlength: "512", "aria-describedby": "how" });
  const said = el("p", { class: "bad-text", role: "alert" });
  const button = el("button", { type: "submit", class: "main" }, "Sign in");
  const form = el("form", { class: "panel signin", onsubmit: async (event) => {
    event.preventDefault();
    button.disabled = true;
    put(said);
    try {
      // A header has no room for other characters, and no key has them.
      if (!/^[\x21-\x7e]+$/.test(key.value.trim())) throw new Error("A key has no spaces and no special characters.");
      const answer = await fetch("/console/session", { method: "POST", headers: { authorization: `Bearer ${key.value.trim()}` } });
      const body = await answer.json();
      if (!answer.ok) throw new Error(body?.error?.message ?? `The answer was ${answer.status}.`);
      key.value = "";
      done(body);
    } catch (error) {
      put(said, error instanceof TypeError ? "The gateway does not answer." : error.message);
      key.select();
    } finally {
      button.disabled = false;
    }
  } },
    el("h1", null, "Sign in"),
    el("input", { type: "text", autocomplete: "username", value: "mooncache console", hidden: true, readonly: true }),
    el("label", { for: "key" }, "Cluster token, or your key"), key, button, said,
    el("div", { id: "how", class: "dim" },
      el("p", null, "The cluster token is a line ", el("code", null, "mcc1.…"), ". On a machine of the cluster ", el("code", null, "mooncache token"), " prints it; ",
        "in the state folder it is the file ", el("code", null, "cluster.token"), "."),
      el("p", null, "To look without the token, give a key of your own ", el("code", null, "console = true"), " in ", el("code", null, "gateway.keys_file"), ". Keys of tenants show the tenant's own usage alone."),
      el("p", null, "With the cluster token you may also drain engines and nodes, and change roles. Each act is kept in the audit log.")));
  put(root, form);
  key.focus();
  return { topic: null, take() {}, close() {} };
}
