// Every setting as this gateway reads it: its value, who set it, its default, and what it is for.

import { el, put } from "./dom.js";
import { poll } from "./poll.js";
import { table } from "./table.js";

export function configuration(root, go, { took, ended }) {
  const top = el("div", { class: "stack" });
  const only = el("input", { type: "checkbox", id: "only-set", onchange: show });
  let settings = [];
  const list = table({
    label: "Settings", noun: ["setting", "settings"], empty: "No setting differs from its default.",
    key: (row) => row.name,
    columns: [
      { name: "setting", value: (row) => row.name, cell: (row) => el("code", null, row.name) },
      { name: "value", value: (row) => text(row.value), cell: (row) => el("span", { class: row.set ? "name chosen-value" : "name", title: text(row.value) }, text(row.value)) },
      { name: "set by", value: (row) => row.source, cell: (row) => el("span", { class: "name", title: row.source }, row.source) },
      { name: "default", wide: true, value: (row) => text(row.default), cell: (row) => el("span", { class: "name", title: text(row.default) }, text(row.default)) },
      { name: "for", wide: true, value: (row) => row.audience },
      { name: "meaning", value: (row) => row.help, cell: (row) => el("span", { class: "name long", title: row.help }, row.help) },
    ],
  });

  function show() {
    list.show(only.checked ? settings.filter((row) => row.set) : settings);
  }

  put(root, el("h1", null, "Configuration"), top, el("label", { for: "only-set" }, only, " only what is set"), list.node);
  const asked = poll("/console/configuration", { took, ended, failed: (said) => put(top, el("p", { class: "note bad", role: "alert" }, said)) });
  return {
    topic: null,
    filter: list.filter,
    take(document) {
      settings = document.settings;
      put(top, el("p", { class: "dim" }, `As gateway ${document.gateway} reads it now: defaults, then cluster.toml, the file, the environment, the command line. Secrets are not shown. `,
        "Other processes may read other files: mooncache config explain shows it where it runs."));
      show();
    },
    close() {
      asked.close();
      list.close();
    },
  };
}

/** A value as the file would have it. */
function text(value) {
  if (value === null || value === "") return "(empty)";
  return typeof value === "string" ? value : JSON.stringify(value);
}
