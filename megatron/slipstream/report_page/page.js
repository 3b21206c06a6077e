// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Draws the charts of a rank from its data, lets readers zoom and inspect them, sorts groups, and shows
// one rank at a time. It inserts text only as text nodes.
"use strict";
(() => {
const MIN_VIEW = 1 / 2000; // Fraction of the iteration.
const GUTTER = 76, LANE = 30, LANE_PITCH = 38, PASSES = 18, AXIS = 20, MEMORY = 230; // Pixels.
const STALL_RISE = 3; // Pixels above and below the lane, so that colour is not a stall's only mark.
const PIXELS_PER_CHARACTER = 6.6;
const MIN_PIXELS = 0.3; // A bar that adds less to the last one of its colour is not seen.
const MIN_PIXELS_LINED = 12; // Lines between narrower bars would hide the bars.
const SHORT_ROWS = 200; // As in page.css.

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const tip = document.querySelector(".tip");

function svg(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least * 0.9999);
}

// The last index whose value is at most `value`; -1 if there is none.
function lastUpTo(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function showTip(lines, { clientX: x, clientY: y }) {
  tip.replaceChildren(...lines.map((line) => Object.assign(document.createElement("span"), { textContent: line })));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, x + 14 + width > innerWidth ? x - 14 - width : x + 14)}px`;
  tip.style.top = `${Math.max(4, y + 14 + height > innerHeight ? y - 14 - height : y + 14)}px`;
}

class Charts {
  constructor(section, data) {
    Object.assign(this, data); // See `figures` in iteration.py.
    [this.from, this.width] = [0, 1]; // The visible part, as fractions of the iteration.
    this.chosen = this.wait = -1;
    this.said = "";
    this.plots = [this.timeline, this.curves] = section.querySelectorAll(".plot");
    this.stalls = this.lanes.flatMap((lane) => lane.waits.start.map((start, place) => ({
      start, length: lane.waits.length[place], text: `${lane.name}: ${this.action(lane.waits, place)}`,
    }))).sort((a, b) => a.start - b.start);
    this.tools = section.querySelector(".chart .tools");
    this.tools.hidden = false;
    this.listen();
  }

  action({ owner, kind }, place) { return `${this.owners[owner[place]]}:${this.kinds[kind[place]]}`; }

  // Changing the visible part.

  view(from, to, said = "") {
    this.width = clamp(to - from, MIN_VIEW, 1);
    this.from = clamp((from + to - this.width) / 2, 0, 1 - this.width);
    this.said = said;
    this.draw();
  }

  move(pixels) {
    const from = clamp(this.from + pixels / this.pixels * this.width, 0, 1 - this.width);
    this.view(from, from + this.width);
  }

  zoom(factor, at = this.from + this.width / 2) {
    const width = clamp(this.width * factor, MIN_VIEW, 1);
    const from = clamp(at - (at - this.from) * width / this.width, 0, 1 - width);
    this.view(from, from + width);
  }

  goToStall(direction) {
    const { stalls, total, unit } = this, count = stalls.length;
    if (!count) return;
    const from = this.from * total, to = from + this.width * total;
    const last = stalls[this.wait]?.start;
    if (last >= from && last <= to) this.wait += direction;
    else if (direction > 0) this.wait = Math.max(0, stalls.findIndex((stall) => stall.start >= from));
    else this.wait = stalls.findLastIndex((stall) => stall.start <= to);
    this.wait = (this.wait + count) % count;
    const { start, length, text } = stalls[this.wait];
    const middle = (start + length / 2) / total;
    const half = clamp(Math.max(length / total * 6, 1 / 120), MIN_VIEW, 0.5);
    this.view(middle - half, middle + half, `${text} stalls compute for ${length.toFixed(3)} ${unit}`);
  }

  showGroup(group) {
    const ends = this.lanes.flatMap(({ bars }) => bars.start.flatMap((start, place) =>
      bars.owner[place] === group ? [start, start + bars.length[place]] : []));
    const first = Math.min(...ends) / this.total, last = Math.max(...ends) / this.total;
    const margin = 0.06 * (last - first);
    this.chosen = group;
    this.view(first - margin, last + margin, this.owners[group]);
    this.timeline.focus();
  }

  // Drawing.

  draw() {
    if (this.due || !this.timeline.clientWidth) return;
    this.due = true;
    this.leave();
    requestAnimationFrame(() => {
      this.due = false;
      this.pixels = this.timeline.getBoundingClientRect().width - GUTTER;
      this.drawTimeline();
      this.drawMemory();
      this.drawTools();
    });
  }

  x(time) { return (time / this.total - this.from) / this.width * this.pixels; }

  // Fills a chart: texts on the left of an area, an axis of time below it.
  frame(plot, height, texts, area) {
    const left = texts.map(([text, y]) => svg("text", { x: GUTTER - 8, y, "text-anchor": "end" }, text));
    plot.replaceChildren(svg("svg", { viewBox: `0 0 ${GUTTER + this.pixels} ${height + AXIS}`, "aria-hidden": true },
      ...left,
      svg("svg", { class: "area", x: GUTTER, width: this.pixels, height }, ...area),
      svg("g", { class: "axis", transform: `translate(${GUTTER} ${height + 15})` }, ...this.timeTicks()),
    ));
  }

  timeTicks() {
    const from = this.from * this.total, span = this.width * this.total;
    const step = niceStep(span / clamp(Math.floor(this.pixels / 90), 2, 10));
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const made = [];
    for (let tick = Math.ceil(from / step - 1e-9); tick * step <= (from + span) * (1 + 1e-12); tick++) {
      const x = this.x(tick * step), share = x / this.pixels;
      const anchor = share < 0.03 ? "start" : share > 0.97 ? "end" : "middle";
      made.push(svg("text", { x, "text-anchor": anchor }, (tick * step).toFixed(digits)));
    }
    return made;
  }

  drawTimeline() {
    const { lanes, passes, pixels } = this, height = PASSES + lanes.length * LANE_PITCH;
    const lines = passes.map((pass) => `M${this.x(pass.start)} ${PASSES}V${height}`).join("");
    // A partly visible pass has its name in the middle of the visible part.
    const names = passes.map(({ start, end, name }) => this.label(this.x(start), this.x(end), 13, name)).filter(Boolean);
    const drawn = lanes.flatMap((lane, row) => this.laneShapes(lane, PASSES + row * LANE_PITCH));
    const texts = lanes.map((lane, row) => [lane.name, PASSES + row * LANE_PITCH + LANE / 2 + 5]);
    this.frame(this.timeline, height, texts, [svg("path", { class: "pass-line", d: lines }), ...names, ...drawn]);
  }

  // A text in the middle of an interval's visible part, if it fits.
  label(left, right, y, text, name = "") {
    [left, right] = [Math.max(0, left), Math.min(this.pixels, right)];
    if (right - left < (text.length + 0.6) * PIXELS_PER_CHARACTER) return null;
    return svg("text", { x: (left + right) / 2, y, "text-anchor": "middle", class: name }, text);
  }

  laneShapes({ bars, waits, areWindows }, y) {
    const { owners, colours, betweenGroups } = this;
    const [first, last] = this.visible(bars.start);
    const paths = {}, drawnTo = {}, labels = [], picked = [];
    for (let i = first; i <= last; i++) {
      const owner = bars.owner[i], left = this.x(bars.start[i]), right = this.x(bars.start[i] + bars.length[i]);
      const colour = betweenGroups.includes(bars.kind[i]) ? "other" : `m${colours[owner]}`;
      if (owner === this.chosen) picked.push(svg("path", { class: "picked", d: this.rectangle(left, right, y) }));
      if (right < drawnTo[colour] + MIN_PIXELS) continue;
      drawnTo[colour] = right;
      paths[colour] = (paths[colour] ?? "") + this.rectangle(left, right, y);
      if (right - left < 3 * PIXELS_PER_CHARACTER) continue;
      const short = owners[owner].split(".", 2).join(".");
      const text = [owners[owner], short].map((name) => this.label(left, right, y + 19, name, colour)).find(Boolean);
      if (text) labels.push(text);
    }
    const [firstWait, lastWait] = this.visible(waits.start);
    let wait = "";
    for (let i = firstWait; i <= lastWait; i++) {
      wait += this.rectangle(this.x(waits.start[i]), this.x(waits.start[i] + waits.length[i]), y, STALL_RISE);
    }
    const isLined = this.pixels > MIN_PIXELS_LINED * (last - first);
    const kind = `bar${areWindows ? " window" : ""}${isLined ? " lined" : ""}`;
    return [
      svg("rect", { class: "ground", y, width: this.pixels, height: LANE }),
      ...Object.entries(paths).map(([colour, d]) => svg("path", { class: `${kind} ${colour}`, d })),
      svg("path", { class: "wait", d: wait }),
      svg("g", { class: "labels" }, ...labels, ...picked),
    ];
  }

  // The first and last place of what may be in view, of intervals of which at most 8 overlap.
  visible(starts) {
    const from = this.from * this.total;
    return [Math.max(0, lastUpTo(starts, from) - 8), lastUpTo(starts, from + this.width * this.total)];
  }

  rectangle(left, right, y, rise = 0) {
    const [from, to] = [left, right].map((x) => clamp(x, -9, this.pixels + 9).toFixed(2));
    return `M${from} ${y - rise}H${to}v${LANE + 2 * rise}H${from}z`;
  }

  drawMemory() {
    const { start, unit, target, curves } = this.memory;
    const names = Object.keys(curves);
    const highest = Math.max(target, 1e-9, ...names.map((name) => curves[name].reduce((a, b) => Math.max(a, b), 0)));
    const step = niceStep(highest / 4), top = step * (Math.floor(highest * 1.06 / step) + 1);
    const y = (value) => MEMORY * (1 - value / top);
    const [first, last] = this.visible(start);
    const texts = [], lines = [], shapes = [];
    for (let tick = 0; tick * step <= top * 1.0001; tick++) {
      texts.push([`${Number((tick * step).toPrecision(6))} ${unit}`, clamp(y(tick * step) + 4, 11, MEMORY)]);
      lines.push(svg("line", { class: "grid", x2: this.pixels, y1: y(tick * step), y2: y(tick * step) }));
    }
    for (const name of names) {
      const values = curves[name];
      let path = `M${this.x(start[first]).toFixed(2)} ${y(values[first]).toFixed(2)}`;
      for (let i = first + 1; i <= last; i++) {
        if (values[i] !== values[i - 1]) path += `H${this.x(start[i]).toFixed(2)}V${y(values[i]).toFixed(2)}`;
      }
      path += `H${this.pixels}`;
      if (name === "with") shapes.push(svg("path", { class: "fill with", d: `${path}V${MEMORY}H${this.x(start[first])}z` }));
      shapes.push(svg("path", { class: `curve ${name}`, d: path }));
    }
    for (const name of names.filter((name) => name !== "host")) {
      const peak = curves[name].reduce((a, b) => Math.max(a, b), 0);
      const cx = this.x(start[curves[name].indexOf(peak)]);
      shapes.push(svg("circle", { class: `peak ${name}`, cx, cy: y(peak), r: 4.5 }));
    }
    if (target) {
      shapes.push(svg("line", { class: "curve target", x2: this.pixels, y1: y(target), y2: y(target) }));
      shapes.push(svg("text", { class: "target-name", x: this.pixels - 6, y: y(target) - 5, "text-anchor": "end" }, "target"));
    }
    this.frame(this.curves, MEMORY, texts, [...lines, ...shapes]);
  }

  drawTools() {
    const { from, width, total, unit } = this;
    const digits = clamp(3 - Math.floor(Math.log10(width * total)), 0, 9);
    const [start, end] = [from, from + width].map((share) => (share * total).toFixed(digits));
    const range = width > 0.9999 ? "" : `${start} to ${end} ${unit}`;
    this.tools.querySelector(".range").textContent = [this.said, range].filter(Boolean).join("  |  ");
    for (const button of this.tools.querySelectorAll("button")) {
      const action = button.dataset.do;
      button.disabled = action === "in" ? width < MIN_VIEW * 1.001
        : action === "out" || action === "all" ? !range : !this.stalls.length;
    }
  }

  // Pointer.

  describe(row, time) {
    const slack = 2 / this.pixels * this.width * this.total, lane = this.lanes[row];
    for (const [bars, isWait] of lane ? [[lane.waits, true], [lane.bars, false]] : []) {
      const last = lastUpTo(bars.start, time + slack);
      for (let i = last; i >= Math.max(0, last - 8); i--) {
        if (time <= bars.start[i] + bars.length[i] + slack) return this.lines(lane, bars, i, isWait);
      }
    }
    return null;
  }

  lines({ areWindows }, bars, place, isWait) {
    const { unit } = this, isWindow = areWindows && !isWait;
    const start = bars.start[place], length = bars.length[place], nbytes = bars.bytes[place];
    const show = (time) => time.toFixed(unit === "ms" ? 3 : 0);
    const name = `${isWait ? "stall at " : ""}${this.action(bars, place)}`;
    const times = isWindow ? `may run from ${show(start)} to ${show(start + length)} ${unit}`
      : `${show(length)} ${unit}, from ${show(start)} ${unit}`;
    if (!nbytes) return [name, times];
    const size = nbytes >= 2 ** 20 ? `${(nbytes / 2 ** 20).toFixed(1)} MiB` : `${(nbytes / 1024).toFixed(1)} KiB`;
    const rate = !isWindow && length > 0 ? `, ${(nbytes / length / 1e6).toFixed(1)} GB/s` : "";
    return [name, times, size + rate];
  }

  describeMemory(time) {
    const { start, unit, curves } = this.memory, step = Math.max(0, lastUpTo(start, time));
    const names = { without: "without the plan", with: "with the plan", measured: "measured", host: "host, in use" };
    return [
      `at ${time.toFixed(this.unit === "ms" ? 2 : 0)} ${this.unit}`,
      ...Object.entries(curves).map(([name, values]) => `${names[name]}: ${values[step].toFixed(2)} ${unit}`),
    ];
  }

  shareAt({ clientX }, plot) {
    return this.from + (clientX - plot.getBoundingClientRect().left - GUTTER) / this.pixels * this.width;
  }

  point(event, plot) {
    this.leave();
    const share = this.shareAt(event, plot), time = share * this.total;
    if (share < this.from || share > this.from + this.width) return;
    for (const area of this.plots) {
      area.querySelector(".area")?.append(svg("line", { class: "cross", x1: this.x(time), x2: this.x(time), y2: "100%" }));
    }
    const row = Math.floor((event.clientY - plot.getBoundingClientRect().top - PASSES) / LANE_PITCH);
    const lines = plot === this.curves ? this.describeMemory(time) : this.describe(row, time);
    if (lines) showTip(lines, event);
  }

  leave() {
    tip.hidden = true;
    for (const plot of this.plots) plot.querySelector(".cross")?.remove();
  }

  listen() {
    const actions = {
      in: () => this.zoom(1 / 2), out: () => this.zoom(2), all: () => { this.chosen = -1; this.view(0, 1); },
      next: () => this.goToStall(1), previous: () => this.goToStall(-1),
      left: () => this.move(-60), right: () => this.move(60),
    };
    const keys = { "+": "in", "=": "in", "-": "out", 0: "all", n: "next", p: "previous", ArrowLeft: "left", ArrowRight: "right" };
    this.tools.addEventListener("click", (event) => actions[event.target.dataset?.do]?.());
    this.timeline.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
      event.preventDefault();
      actions[keys[event.key]]();
    });
    for (const plot of this.plots) {
      let last = 0;
      plot.addEventListener("pointerdown", (event) => { last = event.clientX; });
      plot.addEventListener("pointermove", (event) => {
        if (event.buttons !== 1) return this.point(event, plot);
        this.move(last - event.clientX);
        last = event.clientX;
      });
      plot.addEventListener("pointerleave", () => this.leave());
      plot.addEventListener("dblclick", (event) => this.zoom(1 / 3, this.shareAt(event, plot)));
      plot.addEventListener("wheel", (event) => {
        const isZoom = event.ctrlKey || event.metaKey;
        if (!isZoom && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
        event.preventDefault();
        if (isZoom) this.zoom(Math.exp(clamp(event.deltaY, -100, 100) / 150), this.shareAt(event, plot));
        else this.move(event.deltaX);
      }, { passive: false });
    }
    new ResizeObserver(() => this.draw()).observe(this.timeline); // It draws for the first time, too.
  }
}

// Makes the titles of a table sort its rows.
function makeSortable(table) {
  const [body] = table.tBodies, rows = [...body.rows], heads = [...table.querySelectorAll("thead th")];

  function sort(place) {
    const head = heads[place], isNumber = !head.classList.contains("text");
    // Numbers sort in descending order first, but for the first column.
    const isAscending = head.ariaSort ? head.ariaSort !== "ascending" : !isNumber || !place;
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", isAscending ? "ascending" : "descending");
    const sign = isAscending ? 1 : -1;
    const key = (row) => row.cells[place].dataset.order ?? row.cells[place].textContent;
    const keyed = rows.map((row) => [key(row), row]);
    // Empty cells are last in both orders.
    keyed.sort(([a], [b]) => !isNumber ? sign * a.localeCompare(b)
      : a === "" || b === "" ? (a === "") - (b === "") : sign * (a - b));
    body.replaceChildren(...keyed.map(([, row]) => row));
  }

  heads.forEach((head, place) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: head.textContent });
    button.addEventListener("click", () => sort(place));
    head.replaceChildren(button);
  });
}

function showGroups(section, charts) {
  const [body] = section.querySelector("table").tBodies, rows = [...body.rows];
  makeSortable(section.querySelector("table"));
  body.addEventListener("click", (event) => {
    if (!event.target.closest("a")) return;
    event.preventDefault();
    charts.showGroup(rows.indexOf(event.target.closest("tr")));
  });
  // A long table shows its first rows; the others are shown on demand because their layout is slow.
  const more = section.querySelector(".more");
  more.hidden = rows.length <= SHORT_ROWS;
  body.classList.toggle("short", !more.hidden);
  more.addEventListener("click", () => { more.hidden = true; body.classList.remove("short"); });
}

// One rank at a time. A rank's data is parsed when the rank is first shown.

const sections = [...document.querySelectorAll("section.rank")];
const links = [...document.querySelectorAll("nav.ranks a")];
const shown = new WeakSet();

function select(id) {
  const section = sections.find((other) => other.id === id) ?? sections[0];
  if (!section) return null;
  for (const other of sections) other.classList.toggle("chosen", other === section);
  for (const link of links) link.ariaCurrent = link.hash === `#${section.id}` ? "true" : null;
  const block = section.querySelector("script.data");
  if (block && !shown.has(section)) {
    shown.add(section);
    showGroups(section.querySelector(".groups"), new Charts(section, JSON.parse(block.textContent)));
  }
  return section;
}

for (const table of document.querySelectorAll("main > section:not(.rank) .sortable")) makeSortable(table);
for (const link of links) {
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    // The scroll position is kept, so that two ranks' charts can be compared.
    event.preventDefault();
    history.pushState(null, "", link.hash);
    select(link.hash.slice(1));
  });
}
addEventListener("popstate", () => select(location.hash.slice(1)));
addEventListener("hashchange", () => select(location.hash.slice(1))?.scrollIntoView());
const first = select(location.hash.slice(1));
if (first && location.hash === `#${first.id}`) first.scrollIntoView();
})();
