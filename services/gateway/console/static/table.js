// A table of any length: rows that are not in sight are not in the document. It sorts, filters and walks by keyboard.

import { el, put } from "./dom.js";
import { plural } from "./format.js";

const ROW_PX = 34;
const AROUND = 8; // rows drawn above and below those in sight

/**
 * columns: [{name, value(row) to sort and filter by, cell(row) -> node or text, number, wide, title}].
 * key(row): its name. open(row): Enter or a click; optional. empty: a sentence for no rows.
 */
export function table({ columns, key, open = null, noun, empty, label, sort = null, tall = true }) {
  let rows = [];
  let shown = [];
  let order = sort; // {column, down}; null: as they came
  let wanted = "";
  let current = null; // key of the row that has the focus ring
  let frame = 0;
  let drawn = new Map(); // rows in the document, by their place

  const filter = el("input", {
    type: "search", class: "filter", placeholder: `Filter ${noun[1]}`, "aria-label": `Filter ${noun[1]}`, autocomplete: "off",
    oninput: () => { wanted = filter.value.trim().toLowerCase(); arrange(); },
  });
  const said = el("span", { class: "dim", role: "status" });
  const heads = columns.map((column, at) => {
    const button = el("button", { type: "button", class: "sort", title: column.title, onclick: () => turn(at) }, column.name);
    return el("th", { scope: "col", class: classOf(column) }, button);
  });
  const body = el("tbody");
  const above = gap(); // rows that are not drawn, as empty space
  const below = gap();
  const grid = el("table", { "aria-label": label }, el("thead", null, el("tr", null, heads)), body);
  const scroller = el("div", { class: tall ? "scroll tall" : "scroll", tabindex: "0", role: "region", "aria-label": label }, grid);
  scroller.addEventListener("scroll", later);
  scroller.addEventListener("keydown", walk);
  const watcher = new ResizeObserver(later);
  watcher.observe(scroller);
  const node = el("div", { class: "listing" }, el("div", { class: "bar" }, filter, said), scroller);

  function classOf(column) {
    return [column.number ? "number" : "", column.wide ? "wide" : ""].join(" ").trim() || null;
  }

  function turn(at) {
    order = order?.column === at ? (order.down === Boolean(columns[at].number) ? { column: at, down: !order.down } : null)
      : { column: at, down: Boolean(columns[at].number) };
    arrange();
  }

  function arrange() {
    shown = wanted
      ? rows.filter((row) => columns.some((column) => String(column.value(row) ?? "").toLowerCase().includes(wanted)))
      : rows.slice();
    if (order) {
      const { value } = columns[order.column];
      const sign = order.down ? -1 : 1;
      shown.sort((one, other) => {
        const [a, b] = [value(one), value(other)];
        if (a === b) return 0;
        if (a === null || a === undefined) return 1; // not known is last either way
        if (b === null || b === undefined) return -1;
        return (a < b ? -1 : 1) * sign;
      });
    }
    heads.forEach((head, at) => {
      const on = order?.column === at;
      head.setAttribute("aria-sort", on ? (order.down ? "descending" : "ascending") : "none");
    });
    const all = plural(rows.length, ...noun);
    put(said, shown.length === rows.length ? all : `${shown.length.toLocaleString("en")} of ${all}`);
    grid.setAttribute("aria-rowcount", String(shown.length + 1));
    draw();
  }

  function later() {
    if (!frame) frame = requestAnimationFrame(() => { frame = 0; draw(drawn); });
  }

  /** before: rows in the document that are still right, by their place; none after the rows have changed. */
  function draw(before = new Map()) {
    drawn = new Map();
    if (!shown.length) {
      put(body, el("tr", null, el("td", { colspan: columns.length, class: "empty" }, rows.length ? "No row has this text." : empty)));
      return;
    }
    const height = scroller.clientHeight || 600;
    const from = Math.max(0, Math.min(shown.length - 1, Math.floor(scroller.scrollTop / ROW_PX) - AROUND));
    const to = Math.min(shown.length, from + Math.ceil(height / ROW_PX) + 2 * AROUND);
    for (let at = from; at < to; at += 1) drawn.set(at, before.get(at) ?? line(shown[at], at));
    const kept = [...drawn].find(([at]) => before.has(at));
    if (kept) { // a list that is scrolled: only the rows at its ends change
      for (const [at, row] of before) if (!drawn.has(at)) row.remove();
      for (const [at, row] of drawn) if (!before.has(at)) body.insertBefore(row, at < kept[0] ? kept[1] : below);
    }
    space(above, from);
    space(below, shown.length - to);
    if (kept) return;
    const focused = document.activeElement?.closest?.("tr")?.dataset.key ?? null;
    put(body, above, ...drawn.values(), below);
    // A link or button that had the focus has it again in its new row.
    if (focused !== null) [...body.rows].find((row) => row.dataset.key === focused)?.querySelector("a,button")?.focus({ preventScroll: true });
  }

  function gap() {
    return el("tr", { class: "gap", "aria-hidden": "true" }, el("td", { colspan: columns.length }));
  }

  function space(row, number) {
    row.hidden = !number;
    row.cells[0].style.height = `${number * ROW_PX}px`;
  }

  function line(row, at) {
    const name = key(row);
    const here = name === current;
    return el("tr", {
      class: [open ? "opens" : "", here ? "current" : ""].join(" ").trim() || null, "aria-rowindex": String(at + 2), "data-key": name,
      onclick: open ? (event) => { if (!event.target.closest("a,button")) open(row); } : null,
    }, columns.map((column) => el("td", { class: classOf(column) }, column.cell ? column.cell(row) : column.value(row) ?? "–")));
  }

  function walk(event) {
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity };
    if (event.target !== scroller || !shown.length) return;
    const at = shown.findIndex((row) => key(row) === current);
    if (event.key in moves) {
      const next = Math.max(0, Math.min(shown.length - 1, at < 0 ? (moves[event.key] > 1e9 ? shown.length - 1 : 0) : at + moves[event.key]));
      current = key(shown[next]);
      const head = grid.tHead.offsetHeight;
      const above = next * ROW_PX;
      if (above < scroller.scrollTop) scroller.scrollTop = above;
      if (above + ROW_PX + head > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = above + ROW_PX + head - scroller.clientHeight;
      event.preventDefault();
      draw();
    } else if (event.key === "Enter" && at >= 0 && open) {
      open(shown[at]);
    }
  }

  return {
    node,
    filter,
    show(fresh) { rows = fresh; arrange(); },
    close() { watcher.disconnect(); cancelAnimationFrame(frame); },
  };
}

/** A small table that is drawn at once: heads are texts, or [text] for numbers. */
export function plain(label, heads, rows) {
  const number = heads.map(Array.isArray);
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    el("table", { "aria-label": label },
      el("thead", null, el("tr", null, heads.map((head, at) => el("th", { scope: "col", class: number[at] ? "number" : null }, head)))),
      el("tbody", null, rows.map((cells) => el("tr", { class: cells.chosen ? "chosen" : null },
        cells.map((cell, at) => el("td", { class: number[at] ? "number" : null }, cell)))))));
}
