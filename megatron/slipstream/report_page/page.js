// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Zooms and inspects charts, sorts groups, shows one rank at a time. All content is already in the
// page; the script inserts text only as text nodes. Zooming makes a chart wider than its box, which
// the browser scrolls.
"use strict";
(() => {
const MIN_VIEW = 1 / 2000; // Fraction of the iteration; below it, coordinates are coarser than pixels.
const MAX_LABELS = 150; // Per lane: with more bars in view, none is wide enough for a label.
const PIXELS_PER_CHARACTER = 6.6;
const SHORT_ROWS = 200; // As in page.css.
const MIN_PIXELS_LINED = 12; // Lines between narrower bars would hide the bars.

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const percent = (share) => `${100 * share}%`;
const tip = document.querySelector(".tip");

function svg(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
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
  tip.replaceChildren(...lines.map((line, place) => {
    const made = document.createElement(place ? "span" : "b");
    made.textContent = line;
    return made;
  }));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, x + 14 + width > innerWidth ? x - 14 - width : x + 14)}px`;
  tip.style.top = `${Math.max(4, y + 14 + height > innerHeight ? y - 14 - height : y + 14)}px`;
}

class Charts {
  constructor(section, data) {
    this.section = section;
    this.data = data;
    [this.from, this.width] = [0, 1]; // The visible part, as fractions of the iteration.
    this.chosen = this.wait = -1;
    this.said = "";
    this.plots = [this.lanes, this.memory] = section.querySelectorAll(".plot");
    this.rows = [...this.lanes.querySelectorAll(".lane")];
    this.waits = data.lanes.flatMap((lane) => lane.waits.start.map((start, place) => ({
      start, length: lane.waits.length[place], text: `${lane.name}: ${this.action(lane.waits, place)}`,
    }))).sort((a, b) => a.start - b.start);
    this.crosses = section.querySelectorAll(".cross");
    this.tools = section.querySelector(".chart .tools");
    this.tools.hidden = false;
    this.listen();
    this.draw();
  }

  kind(bars, place) { return this.data.kinds[bars.kind[place]]; }

  action(bars, place) { return `${this.data.owners[bars.owner[place]]}:${this.kind(bars, place)}`; }

  // Changing the visible part.

  view(from, to, said = "") {
    this.width = clamp(to - from, MIN_VIEW, 1);
    this.from = clamp((from + to - this.width) / 2, 0, 1 - this.width);
    for (const plot of this.plots) {
      plot.firstElementChild.style.width = percent(1 / this.width);
      plot.scrollLeft = this.from * plot.scrollWidth;
    }
    this.said = said;
    this.draw();
  }

  // A browser scrolls by whole pixels. With rounding at each zoom, the point under the pointer would drift.
  scrolled(plot) {
    const from = plot.scrollLeft / plot.scrollWidth;
    if (!plot.scrollWidth || Math.abs(from - this.from) * plot.scrollWidth < 1) return;
    this.from = from;
    for (const other of this.plots) other.scrollLeft = plot.scrollLeft;
    this.draw();
  }

  zoom(factor, at = this.from + this.width / 2) {
    const width = clamp(this.width * factor, MIN_VIEW, 1);
    const from = at - (at - this.from) * width / this.width;
    this.view(from, from + width);
  }

  goToWait(direction) {
    const count = this.waits.length;
    if (!count) return;
    const { total, unit } = this.data;
    const from = this.from * total, to = from + this.width * total;
    const last = this.waits[this.wait]?.start;
    if (last >= from && last <= to) this.wait += direction;
    else if (direction > 0) this.wait = Math.max(0, this.waits.findIndex((wait) => wait.start >= from));
    else this.wait = this.waits.findLastIndex((wait) => wait.start <= to);
    this.wait = (this.wait + count) % count;
    const { start, length, text } = this.waits[this.wait];
    const middle = (start + length / 2) / total;
    const half = clamp(Math.max(length / total * 6, 1 / 120), MIN_VIEW, 0.5);
    this.view(middle - half, middle + half, `${text} stalls compute for ${length.toFixed(3)} ${unit}`);
  }

  showGroup(group) {
    const { lanes, owners, total } = this.data;
    const ends = lanes.flatMap(({ bars }) => bars.start.flatMap((start, place) =>
      bars.owner[place] === group ? [start, start + bars.length[place]] : []));
    const first = Math.min(...ends), last = Math.max(...ends);
    const margin = 0.06 * (last - first);
    this.chosen = group;
    this.view((first - margin) / total, (last + margin) / total, owners[group]);
    this.lanes.focus();
  }

  // Drawing the parts that depend on the view.

  draw() {
    if (this.due) return;
    this.due = true;
    this.leave();
    requestAnimationFrame(() => {
      this.due = false;
      const { from, width } = this;
      this.drawPasses(from, from + width);
      this.drawLabels(from, from + width);
      this.drawAxes(from, from + width);
      this.drawTools(from, from + width);
    });
  }

  room(left, right) { return (right - left) / this.width * this.lanes.clientWidth / PIXELS_PER_CHARACTER; }

  // A partly visible pass has its label in the middle of the visible part.
  drawPasses(from, to) {
    for (const mark of this.lanes.querySelectorAll("[data-x]")) {
      const middle = Number(mark.dataset.x), half = Number(mark.dataset.width) / 2;
      const left = Math.max(middle - half, from), right = Math.min(middle + half, to);
      mark.setAttribute("x", percent((left + right) / 2));
      const fits = this.room(left, right) > mark.textContent.length + 0.6;
      mark.setAttribute("visibility", fits ? "visible" : "hidden");
    }
  }

  drawLabels(from, to) {
    const { total, owners, colours, kindsBetweenGroups } = this.data;
    const made = [];
    this.data.lanes.forEach(({ bars }, row) => {
      const ground = this.rows[row].querySelector(".lane-ground");
      const y = Number(ground.getAttribute("y")), height = Number(ground.getAttribute("height"));
      const first = Math.max(0, lastUpTo(bars.start, from * total) - 8);
      const last = lastUpTo(bars.start, to * total);
      this.rows[row].classList.toggle("lined", this.lanes.clientWidth > MIN_PIXELS_LINED * (last - first));
      for (let i = first; i <= last; i++) {
        const left = Math.max(from, bars.start[i] / total);
        const right = Math.min(to, (bars.start[i] + bars.length[i]) / total);
        if (right <= left) continue;
        if (bars.owner[i] === this.chosen) {
          made.push(svg("rect", { x: percent(left), width: percent(right - left), y, height }));
        }
        if (last - first > MAX_LABELS) continue;
        const full = owners[bars.owner[i]], room = this.room(left, right);
        const text = room > full.length + 1 ? full : full.split(".", 2).join(".");
        if (room < Math.max(3, text.length + 0.6)) continue;
        const colour = kindsBetweenGroups.includes(this.kind(bars, i)) ? "other" : `c${colours[bars.owner[i]]}`;
        made.push(svg("text", { x: percent((left + right) / 2), y: y + height / 2, dy: "0.35em", "text-anchor": "middle", class: colour }, text));
      }
    });
    this.lanes.querySelector(".labels").replaceChildren(...made);
  }

  drawAxes(from, to) {
    const { total } = this.data;
    const step = niceStep((to - from) * total / clamp(Math.floor(this.lanes.clientWidth / 90), 2, 10));
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    for (const axis of this.section.querySelectorAll(".axis")) {
      axis.replaceChildren();
      for (let tick = Math.ceil(from * total / step - 1e-9); tick * step <= to * total * (1 + 1e-12); tick++) {
        const share = tick * step / total, place = (share - from) / (to - from);
        const anchor = place < 0.03 ? "start" : place > 0.97 ? "end" : "middle";
        axis.append(svg("text", { x: percent(share), y: 15, "text-anchor": anchor }, (tick * step).toFixed(digits)));
      }
    }
  }

  drawTools(from, to) {
    const isAll = to - from > 0.9999;
    const show = (share) => (share * this.data.total).toPrecision(4);
    const range = isAll ? "" : `${show(from)} to ${show(to)} ${this.data.unit}`;
    this.tools.querySelector(".range").textContent = [this.said, range].filter(Boolean).join("  |  ");
    for (const button of this.tools.querySelectorAll("button")) {
      const action = button.dataset.do;
      button.disabled = action === "in" ? to - from < MIN_VIEW * 1.001
        : action === "out" || action === "all" ? isAll : this.waits.length === 0;
    }
  }

  // Pointer.

  describe(row, time) {
    const slack = 2 / this.lanes.clientWidth * this.width * this.data.total;
    const lane = this.data.lanes[row];
    for (const [bars, isWait] of lane ? [[lane.waits, true], [lane.bars, false]] : []) {
      const last = lastUpTo(bars.start, time + slack);
      for (let i = last; i >= Math.max(0, last - 8); i--) {
        if (time <= bars.start[i] + bars.length[i] + slack) return this.lines(lane, bars, i, isWait);
      }
    }
    return null;
  }

  lines(lane, bars, place, isWait) {
    const { unit } = this.data;
    const start = bars.start[place], length = bars.length[place], nbytes = bars.bytes[place];
    const digits = unit === "ms" ? 3 : 0;
    const show = (time) => time.toFixed(digits);
    const name = this.action(bars, place);
    const lines = lane.areWindows && !isWait
      ? [name, `may run from ${show(start)} to ${show(start + length)} ${unit}`]
      : [isWait ? `stall at ${name}` : name, `${show(length)} ${unit}, from ${show(start)} ${unit}`];
    if (nbytes) {
      const size = nbytes >= 2 ** 20 ? `${(nbytes / 2 ** 20).toFixed(1)} MiB` : `${(nbytes / 1024).toFixed(1)} KiB`;
      const rate = !lane.areWindows && length > 0 ? `, ${(nbytes / length / 1e6).toFixed(1)} GB/s` : "";
      lines.push(size + rate);
    }
    return lines;
  }

  describeMemory(time) {
    const { start, unit, curves } = this.data.memory;
    const step = Math.max(0, lastUpTo(start, time));
    const names = { without: "without the plan", with: "with the plan", measured: "measured", host: "host, in use" };
    return [
      `at ${time.toFixed(this.data.unit === "ms" ? 2 : 0)} ${this.data.unit}`,
      ...Object.entries(curves).map(([name, values]) => `${names[name]}: ${values[step].toFixed(2)} ${unit}`),
    ];
  }

  shareAt(event, plot) {
    const { left, width } = plot.getBoundingClientRect();
    return this.from + (event.clientX - left) / width * this.width;
  }

  point(event, plot) {
    const share = this.shareAt(event, plot), time = share * this.data.total;
    for (const cross of this.crosses) {
      cross.style.transform = `translateX(${share * plot.scrollWidth}px)`;
      cross.hidden = false;
    }
    const lines = plot === this.memory ? this.describeMemory(time)
      : this.describe(this.rows.indexOf(event.target.closest(".lane")), time);
    if (lines) showTip(lines, event); else tip.hidden = true;
  }

  leave() {
    tip.hidden = true;
    for (const cross of this.crosses) cross.hidden = true;
  }

  listen() {
    const actions = {
      in: () => this.zoom(1 / 2), out: () => this.zoom(2), all: () => { this.chosen = -1; this.view(0, 1); },
      next: () => this.goToWait(1), previous: () => this.goToWait(-1),
    };
    const keys = { "+": "in", "=": "in", "-": "out", 0: "all", n: "next", p: "previous" };
    this.tools.addEventListener("click", (event) => actions[event.target.dataset?.do]?.());
    this.lanes.addEventListener("keydown", (event) => {
      if (!(event.ctrlKey || event.metaKey || event.altKey)) actions[keys[event.key]]?.();
    });
    for (const plot of this.plots) {
      plot.addEventListener("scroll", () => this.scrolled(plot));
      plot.addEventListener("pointermove", (event) => {
        if (event.buttons !== 1) return this.point(event, plot);
        plot.scrollLeft -= event.movementX;
      });
      plot.addEventListener("pointerleave", () => this.leave());
      plot.addEventListener("dblclick", (event) => this.zoom(1 / 3, this.shareAt(event, plot)));
      plot.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.zoom(Math.exp(clamp(event.deltaY, -100, 100) / 150), this.shareAt(event, plot));
      }, { passive: false });
    }
    // A hidden element loses its scroll position.
    new ResizeObserver(() => this.view(this.from, this.from + this.width, this.said)).observe(this.lanes);
  }
}

class Groups {
  constructor(section, charts) {
    this.section = section.querySelector(".groups");
    this.body = this.section.querySelector("tbody");
    this.rows = [...this.body.rows];
    this.heads = [...this.section.querySelectorAll("thead th")];
    this.filters = [...this.section.querySelectorAll("select")];
    this.more = this.section.querySelector(".more");
    this.section.querySelector(".tools").hidden = false;
    this.heads.forEach((head, place) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      button.addEventListener("click", () => this.sort(place));
      head.replaceChildren(button);
    });
    for (const filter of this.filters) filter.addEventListener("change", () => this.filter(false));
    this.more.addEventListener("click", () => this.filter(true));
    this.body.addEventListener("click", (event) => {
      if (!event.target.closest("a")) return;
      event.preventDefault();
      charts.showGroup(this.rows.indexOf(event.target.closest("tr")));
    });
    this.filter(false);
  }

  sort(place) {
    const head = this.heads[place], isNumber = !head.classList.contains("text");
    // Numbers sort in descending order first.
    const isAscending = head.ariaSort ? head.ariaSort !== "ascending" : !isNumber || place < 4;
    for (const other of this.heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", isAscending ? "ascending" : "descending");
    const sign = isAscending ? 1 : -1;
    const keyed = this.rows.map((row) => {
      const { dataset, textContent } = row.cells[place];
      return { row, key: dataset.order ?? textContent };
    });
    // Empty cells are last in both orders.
    keyed.sort(({ key: a }, { key: b }) => !isNumber ? sign * a.localeCompare(b)
      : a === "" || b === "" ? (a === "") - (b === "") : sign * (a - b));
    this.body.replaceChildren(...keyed.map(({ row }) => row));
  }

  // A long table shows its first rows; the others are shown on demand because their layout is slow.
  filter(isWhole) {
    const [module, state] = this.filters.map((filter) => filter.value);
    for (const row of this.rows) {
      row.hidden = Boolean((state && !row.classList.contains(state)) || (module && row.cells[1].textContent !== module));
    }
    this.body.classList.toggle("short", !isWhole);
    const all = this.rows.length, shown = this.rows.filter((row) => !row.hidden).length;
    this.section.querySelector(".count").textContent = `${shown === all ? "" : `${shown} of `}${all} groups`;
    this.more.hidden = isWhole || shown <= SHORT_ROWS;
  }
}

// One rank at a time. A rank's data is parsed when the rank is first shown.

const sections = [...document.querySelectorAll("section.rank")];
const links = [...document.querySelectorAll("nav.ranks a")];
const shown = new WeakSet();

function select(id) {
  const section = sections.find((other) => other.id === id) ?? sections[0];
  if (!section) return null;
  for (const other of sections) {
    other.hidden = other !== section;
    other.classList.toggle("chosen", other === section);
  }
  for (const link of links) {
    if (link.hash === `#${section.id}`) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  const block = section.querySelector("script.data");
  if (block && !shown.has(section)) {
    shown.add(section);
    new Groups(section, new Charts(section, JSON.parse(block.textContent)));
  }
  return section;
}

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
