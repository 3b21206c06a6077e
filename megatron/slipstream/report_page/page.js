// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Zooming and pointing in the timeline, sorting of groups, one rank at a time. All that is drawn is
// in the page already; nothing here puts text into it other than as text.
"use strict";
(() => {
const MIN_VIEW = 1 / 2000; // Of the iteration: beyond it coordinates are coarser than pixels.
const MAX_LABELS = 150; // Of a lane: with more bars in view none is wide enough.
const PIXELS_PER_CHARACTER = 6.6;
const MIN_PIXELS_LINED = 12; // Lines between narrower bars would be all that is seen.
const PAGE_ROWS = 200;
const DRAG_PIXELS = 3;

const svg = (name, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};
const percent = (share) => `${(100 * share).toFixed(3)}%`;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least * 0.9999);
}

// The last place whose value is not above `value`; -1 if there is none.
function lastUpTo(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

class Tip {
  constructor() { this.box = document.querySelector(".tip"); }

  show(lines, x, y) {
    this.box.replaceChildren(...lines.map((line, place) => {
      const made = document.createElement(place ? "span" : "b");
      made.textContent = line;
      return made;
    }));
    this.box.hidden = false;
    const { width, height } = this.box.getBoundingClientRect();
    const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
    const top = y + 14 + height > innerHeight ? y - 14 - height : y + 14;
    this.box.style.left = `${Math.max(4, left)}px`;
    this.box.style.top = `${Math.max(4, top)}px`;
  }

  hide() { this.box.hidden = true; }
}

class Charts {
  constructor(section, data, tip) {
    this.section = section;
    this.data = data;
    this.tip = tip;
    this.width = Number(section.dataset.width);
    this.from = 0;
    this.to = 1;
    this.chosen = -1;
    this.wait = -1; // The one that was gone to, while it is in view.
    this.lanes = section.querySelector(".plot.lanes");
    this.memory = section.querySelector(".plot.memory");
    this.laneGroups = [...this.lanes.querySelectorAll(".lane")];
    this.crosses = [...section.querySelectorAll(".cross")];
    this.labels = this.lanes.querySelector(".labels");
    this.placed = [...section.querySelectorAll("[data-x]")];
    this.waits = data.lanes.flatMap((lane) => lane.waits.start.map((start, place) => ({
      start, length: lane.waits.length[place], text: `${lane.name}: ${this.action(lane.waits, place)}`,
    }))).sort((a, b) => a.start - b.start);
    this.tools = this.lanes.closest(".chart").querySelector(".tools");
    this.tools.hidden = false;
    this.range = this.tools.querySelector(".range");
    this.listen();
    this.draw();
  }

  kind(bars, place) { return this.data.kinds[bars.kind[place]]; }

  action(bars, place) { return `${this.data.owners[bars.owner[place]]}:${this.kind(bars, place)}`; }

  // Changing what is in view.

  view(from, to) {
    this.wait = -1;
    const width = clamp(to - from, MIN_VIEW, 1);
    const middle = (from + to) / 2;
    this.from = clamp(middle - width / 2, 0, 1 - width);
    this.to = this.from + width;
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => { this.due = false; this.draw(); });
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    const width = clamp((this.to - this.from) * factor, MIN_VIEW, 1);
    const share = (at - this.from) / (this.to - this.from);
    this.view(at - share * width, at - share * width + width);
  }

  pan(share) {
    const by = share * (this.to - this.from);
    const from = clamp(this.from + by, 0, 1 - (this.to - this.from));
    this.view(from, from + this.to - this.from);
  }

  goToWait(direction) {
    const count = this.waits.length;
    if (!count) return;
    let place = this.wait + direction;
    if (this.wait < 0) {
      // The view was chosen by other means: begin with the first, or the last, that is in it.
      const [from, to] = [this.from * this.data.total, this.to * this.data.total];
      const isAhead = direction > 0 ? (wait) => wait.start >= from : (wait) => wait.start <= to;
      place = direction > 0 ? this.waits.findIndex(isAhead) : this.waits.findLastIndex(isAhead);
      if (place < 0) place = direction > 0 ? 0 : count - 1;
    }
    place = (place + count) % count;
    const next = this.waits[place];
    const middle = (next.start + next.length / 2) / this.data.total;
    const half = clamp(Math.max(next.length / this.data.total * 6, 1 / 120), MIN_VIEW, 0.5);
    this.view(middle - half, middle + half);
    this.wait = place;
    this.said = `${next.text} waits ${next.length.toFixed(3)} ${this.data.unit}`;
  }

  showGroup(group) {
    this.chosen = group;
    let first = this.data.total, last = 0;
    for (const { bars } of this.data.lanes) {
      bars.owner.forEach((other, place) => {
        if (other !== group) return;
        first = Math.min(first, bars.start[place]);
        last = Math.max(last, bars.start[place] + bars.length[place]);
      });
    }
    const margin = 0.06 * (last - first);
    this.view((first - margin) / this.data.total, (last + margin) / this.data.total);
    this.said = this.data.owners[group];
    this.lanes.focus();
  }

  // Drawing.

  draw() {
    const width = this.to - this.from;
    for (const inner of this.section.querySelectorAll(".stretch")) {
      const [, , , height] = inner.getAttribute("viewBox").split(" ");
      inner.setAttribute("viewBox", `${this.from * this.width} 0 ${width * this.width} ${height}`);
    }
    this.place();
    this.drawLabels();
    for (const axis of this.section.querySelectorAll(".axis")) this.drawAxis(axis);
    this.drawTools();
  }

  place() {
    const width = this.to - this.from;
    const pixels = this.lanes.clientWidth;
    for (const mark of this.placed) {
      let x = Number(mark.dataset.x), isSeen = x >= this.from && x <= this.to;
      if (mark.dataset.width !== undefined) {
        // A pass that is partly in view has its name in the middle of that part.
        const half = Number(mark.dataset.width) / 2;
        const left = Math.max(x - half, this.from), right = Math.min(x + half, this.to);
        isSeen = (right - left) / width * pixels > (mark.textContent.length + 0.6) * PIXELS_PER_CHARACTER;
        x = (left + right) / 2;
      }
      mark.setAttribute(mark.tagName === "circle" ? "cx" : "x", percent((x - this.from) / width));
      mark.setAttribute("visibility", isSeen ? "visible" : "hidden");
    }
  }

  drawLabels() {
    const made = [];
    const scale = 1 / (this.data.total * (this.to - this.from));
    const pixels = this.lanes.clientWidth;
    const place = (time) => time * scale - this.from / (this.to - this.from);
    this.data.lanes.forEach(({ bars }, row) => {
      const ground = this.laneGroups[row].querySelector(".lane-ground");
      const y = Number(ground.getAttribute("y")), height = Number(ground.getAttribute("height"));
      const first = Math.max(0, lastUpTo(bars.start, this.from * this.data.total) - 8);
      const last = lastUpTo(bars.start, this.to * this.data.total);
      const isClose = last - first <= MAX_LABELS;
      this.laneGroups[row].classList.toggle("lined", pixels > MIN_PIXELS_LINED * (last - first));
      for (let i = first; i <= last; i++) {
        const left = Math.max(0, place(bars.start[i]));
        const right = Math.min(1, place(bars.start[i] + bars.length[i]));
        if (right <= left) continue;
        if (bars.owner[i] === this.chosen) {
          made.push(svg("rect", { x: percent(left), width: percent(right - left), y, height }));
        }
        const room = (right - left) * pixels / PIXELS_PER_CHARACTER;
        if (!isClose || room < 3) continue;
        const full = this.data.owners[bars.owner[i]];
        const short = full.split(".", 2).join(".");
        const text = room > full.length + 1 ? full : short;
        if (room < text.length + 0.6) continue;
        const colour = this.data.kindsBetweenGroups.includes(this.kind(bars, i)) ? "other" : `c${this.data.colours[bars.owner[i]]}`;
        const label = svg("text", { x: percent((left + right) / 2), y: y + height / 2, dy: "0.35em", "text-anchor": "middle", class: colour });
        label.textContent = text;
        made.push(label);
      }
    });
    this.labels.replaceChildren(...made);
  }

  drawAxis(axis) {
    const from = this.from * this.data.total, to = this.to * this.data.total;
    const room = Math.max(2, Math.min(10, Math.floor(this.lanes.clientWidth / 90)));
    const step = niceStep((to - from) / room);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const made = [];
    for (let tick = Math.ceil(from / step - 1e-9); tick * step <= to * (1 + 1e-12); tick++) {
      const share = (tick * step - from) / (to - from);
      const anchor = share < 0.03 ? "start" : share > 0.97 ? "end" : "middle";
      const text = svg("text", { x: percent(share), y: 15, "text-anchor": anchor });
      text.textContent = (tick * step).toFixed(digits);
      made.push(text);
    }
    axis.replaceChildren(...made);
  }

  drawTools() {
    const isAll = this.to - this.from >= 1;
    const show = (share) => (share * this.data.total).toPrecision(4);
    const text = isAll ? "" : `${show(this.from)} to ${show(this.to)} ${this.data.unit}`;
    this.range.textContent = this.said ? `${this.said}  |  ${text}` : text;
    this.said = "";
    for (const button of this.tools.querySelectorAll("button")) {
      const action = button.dataset.do;
      button.disabled = action === "in" ? this.to - this.from <= MIN_VIEW
        : action === "out" || action === "all" ? isAll : this.waits.length === 0;
    }
  }

  // Pointing.

  describe(row, time) {
    const slack = 2 / this.lanes.clientWidth * (this.to - this.from) * this.data.total;
    const lane = this.data.lanes[row];
    if (!lane) return null;
    for (const [bars, isWait] of [[lane.waits, true], [lane.bars, false]]) {
      const last = lastUpTo(bars.start, time + slack);
      for (let i = last; i >= Math.max(0, last - 8); i--) {
        if (time > bars.start[i] + bars.length[i] + slack) continue;
        return this.lines(lane, bars, i, isWait);
      }
    }
    return null;
  }

  lines(lane, bars, place, isWait) {
    const { unit } = this.data;
    const start = bars.start[place], length = bars.length[place];
    const digits = unit === "ms" ? 3 : 0;
    const name = this.action(bars, place);
    const lines = [isWait ? `compute waits at ${name}` : name];
    if (isWait) lines.push(`${length.toFixed(3)} ms, from ${start.toFixed(3)} ms`);
    else if (lane.areWindows) lines.push(`may run from ${start.toFixed(digits)} to ${(start + length).toFixed(digits)} ${unit}`);
    else lines.push(`${length.toFixed(digits)} ${unit}, from ${start.toFixed(digits)} ${unit}`);
    const nbytes = bars.bytes[place];
    if (nbytes) {
      const mib = nbytes / 2 ** 20;
      const rate = !lane.areWindows && length > 0 ? `, ${(nbytes / length / 1e6).toFixed(1)} GB/s` : "";
      lines.push(`${mib >= 1 ? mib.toFixed(1) + " MiB" : (nbytes / 1024).toFixed(1) + " KiB"}${rate}`);
    }
    return lines;
  }

  describeMemory(time) {
    const { start, unit, curves } = this.data.memory;
    const step = Math.max(0, lastUpTo(start, time));
    const names = { without: "without the plan", with: "with the plan", measured: "measured", host: "host, lent" };
    const lines = [`at ${time.toFixed(this.data.unit === "ms" ? 2 : 0)} ${this.data.unit}`];
    for (const [name, values] of Object.entries(curves)) {
      lines.push(`${names[name]}: ${values[step].toFixed(2)} ${unit}`);
    }
    return lines;
  }

  point(event, plot) {
    const area = plot.querySelector(".area").getBoundingClientRect();
    const share = (event.clientX - area.left) / area.width;
    if (share < 0 || share > 1) return this.leave();
    const time = (this.from + share * (this.to - this.from)) * this.data.total;
    for (const cross of this.crosses) {
      cross.style.transform = `translateX(${share * area.width}px)`;
      cross.hidden = false;
    }
    let lines;
    if (plot === this.memory) lines = this.describeMemory(time);
    else {
      const y = event.clientY - area.top;
      const row = this.laneGroups.findIndex((lane) => {
        const ground = lane.querySelector(".lane-ground");
        const top = Number(ground.getAttribute("y"));
        return y >= top && y <= top + Number(ground.getAttribute("height"));
      });
      lines = this.describe(row, time);
    }
    if (lines) this.tip.show(lines, event.clientX, event.clientY); else this.tip.hide();
  }

  leave() {
    this.tip.hide();
    for (const cross of this.crosses) cross.hidden = true;
  }

  shareAt(event, plot) {
    const area = plot.querySelector(".area").getBoundingClientRect();
    return this.from + (event.clientX - area.left) / area.width * (this.to - this.from);
  }

  // Listening.

  listen() {
    for (const plot of [this.lanes, this.memory]) this.listenTo(plot);
    const actions = {
      in: () => this.zoom(1 / 2), out: () => this.zoom(2), all: () => { this.chosen = -1; this.view(0, 1); },
      next: () => this.goToWait(1), previous: () => this.goToWait(-1),
    };
    this.tools.addEventListener("click", (event) => actions[event.target.dataset?.do]?.());
    const keys = {
      ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15), "+": actions.in, "=": actions.in,
      "-": actions.out, 0: actions.all, n: actions.next, p: actions.previous,
    };
    this.lanes.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key)) return;
      event.preventDefault();
      keys[event.key]();
    });
    new ResizeObserver(() => this.draw()).observe(this.lanes);
  }

  listenTo(plot) {
    let held = null;
    plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      held = { x: event.clientX, from: this.from, isDrag: false };
    });
    plot.addEventListener("pointermove", (event) => {
      if (held && !held.isDrag && Math.abs(event.clientX - held.x) > DRAG_PIXELS) {
        held.isDrag = true;
        plot.setPointerCapture(event.pointerId);
        plot.classList.add("dragging");
      }
      if (!held?.isDrag) return this.point(event, plot);
      this.leave();
      const width = this.to - this.from;
      const by = (held.x - event.clientX) / plot.clientWidth * width;
      const from = clamp(held.from + by, 0, 1 - width);
      this.view(from, from + width);
    });
    for (const name of ["pointerup", "pointercancel"]) {
      plot.addEventListener(name, () => { held = null; plot.classList.remove("dragging"); });
    }
    plot.addEventListener("pointerleave", () => this.leave());
    plot.addEventListener("dblclick", (event) => this.zoom(1 / 3, this.shareAt(event, plot)));
    plot.addEventListener("wheel", (event) => {
      const isZoom = event.ctrlKey || event.metaKey;
      if (!isZoom && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
      event.preventDefault();
      if (isZoom) this.zoom(Math.exp(clamp(event.deltaY, -100, 100) / 150), this.shareAt(event, plot));
      else this.pan(event.deltaX / plot.clientWidth);
    }, { passive: false });
  }
}

class Groups {
  constructor(section, data, charts) {
    this.section = section.querySelector(".groups");
    this.columns = data.columns;
    for (const column of this.columns) {
      // A number is sorted by what it shows, or by what that stands for.
      if (column.isNumber && !column.order.length) {
        column.order = column.text.map((text) => text === "" ? null : Number(text));
      }
    }
    this.states = data.states;
    this.waits = data.waits;
    this.charts = charts;
    this.numShown = PAGE_ROWS;
    this.sorted = { column: -1, isAscending: true };
    this.body = this.section.querySelector("tbody");
    this.heads = [...this.section.querySelectorAll("thead th")];
    this.filters = [...this.section.querySelectorAll("[data-filter]")];
    this.more = this.section.querySelector("[data-do=more]");
    this.section.querySelector(".tools").hidden = false;
    this.section.querySelector(".static")?.remove();
    this.listen();
    this.draw();
  }

  listen() {
    this.heads.forEach((head, place) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      button.title = head.title;
      button.addEventListener("click", () => this.sort(place));
      head.replaceChildren(button);
    });
    const modules = [...new Set(this.columns[1].text)];
    const [module] = this.filters;
    for (const name of modules) {
      const option = document.createElement("option");
      option.value = option.textContent = name;
      module.append(option);
    }
    for (const filter of this.filters) {
      filter.addEventListener("change", () => { this.numShown = PAGE_ROWS; this.draw(); });
    }
    this.more.addEventListener("click", () => { this.numShown += PAGE_ROWS; this.draw(); });
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest("button.show")?.dataset.row;
      if (row !== undefined) this.charts.showGroup(Number(row));
    });
  }

  sort(column) {
    const isSame = this.sorted.column === column;
    // Of figures, the largest are looked for.
    const first = !this.columns[column].isNumber || column < 4;
    this.sorted = { column, isAscending: isSame ? !this.sorted.isAscending : first };
    this.heads.forEach((head, place) => {
      if (place !== column) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", this.sorted.isAscending ? "ascending" : "descending");
    });
    this.draw();
  }

  rows() {
    const [module, state] = this.filters.map((filter) => filter.value);
    const rows = [];
    this.columns[1].text.forEach((name, row) => {
      const isState = !state || (state === "waits" ? this.waits[row] : this.states[row] === state);
      if ((!module || name === module) && isState) rows.push(row);
    });
    const { column, isAscending } = this.sorted;
    if (column < 0) return rows;
    const { order, text, isNumber } = this.columns[column];
    const sign = isAscending ? 1 : -1;
    return rows.sort((a, b) => {
      if (!isNumber) return sign * text[a].localeCompare(text[b]) || a - b;
      const [x, y] = [order[a], order[b]];
      if (x === null || y === null) return (x === null) - (y === null) || a - b;
      return sign * (x - y) || a - b;
    });
  }

  draw() {
    const rows = this.rows();
    const made = document.createDocumentFragment();
    for (const row of rows.slice(0, this.numShown)) made.append(this.row(row));
    this.body.replaceChildren(made);
    const shown = Math.min(rows.length, this.numShown);
    const all = this.states.length;
    this.section.querySelector(".count").textContent =
      `${rows.length === all ? "" : `${rows.length} of `}${all} groups${shown < rows.length ? `, ${shown} shown` : ""}`;
    this.more.closest("p").hidden = shown === rows.length;
    this.more.textContent = `Show ${Math.min(PAGE_ROWS, rows.length - shown)} more`;
  }

  row(place) {
    const row = document.createElement("tr");
    this.columns.forEach((column, number) => {
      const cell = row.insertCell();
      if (!column.isNumber) cell.className = "text";
      if (number) { cell.textContent = column.text[place]; return; }
      const button = document.createElement("button");
      button.type = "button";
      button.className = "show";
      button.dataset.row = place;
      button.textContent = column.text[place];
      button.setAttribute("aria-label", `Show group ${column.text[place]} in the timeline`);
      cell.append(button);
    });
    return row;
  }
}

// One rank at a time. What a rank's page needs is read when it is first shown.

const tip = new Tip();
const sections = [...document.querySelectorAll("section.rank")];
const links = [...document.querySelectorAll("nav.ranks a")];
const shown = new WeakSet();

function select(id) {
  const section = sections.find((other) => other.id === id) ?? sections[0];
  if (!section) return null;
  for (const other of sections) other.hidden = other !== section;
  for (const link of links) {
    if (link.hash === `#${section.id}`) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  if (!shown.has(section)) {
    shown.add(section);
    const block = section.querySelector("script.data");
    if (block) {
      const data = JSON.parse(block.textContent);
      new Groups(section, data.table, new Charts(section, data, tip));
    }
  }
  return section;
}

for (const link of links) {
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    // The page stays where it is, so that two ranks' charts can be compared.
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
