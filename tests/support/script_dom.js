// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// As much of a browser as the page's script uses. There is no layout: a plot is PLOT_PIXELS wide,
// and its content as many times as its style says. Scroll positions are whole pixels.
"use strict";
const PLOT_PIXELS = 1000, PLOT_LEFT = 100;
const frames = [], observers = [], windowListeners = {};

class Element {
  constructor(tag, attributes = {}) {
    [this.tag, this.attributes, this.nodes, this.parent] = [tag, { ...attributes }, [], null];
    [this.listeners, this.style, this.scrolledTo] = [{}, {}, 0];
    const camel = (name) => `data-${name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`)}`;
    this.dataset = new Proxy({}, { get: (_, name) => this.attributes[camel(name)] });
    const names = () => (this.attributes.class ?? "").split(/\s+/).filter(Boolean);
    this.classList = {
      contains: (name) => names().includes(name),
      toggle: (name, isOn) => {
        const others = names().filter((other) => other !== name);
        this.attributes.class = (isOn ? [...others, name] : others).join(" ");
      },
    };
  }

  get children() { return this.nodes.filter((node) => node instanceof Element); }
  get firstElementChild() { return this.children[0]; }
  get rows() { return this.children; }
  get cells() { return this.children; }
  get textContent() { return this.nodes.map((node) => node.textContent ?? node).join(""); }
  set textContent(text) { this.nodes = text === "" ? [] : [String(text)]; }
  get id() { return this.attributes.id ?? ""; }
  get hidden() { return "hidden" in this.attributes; }
  set hidden(isHidden) { if (isHidden) this.attributes.hidden = ""; else delete this.attributes.hidden; }
  get ariaSort() { return this.attributes["aria-sort"] ?? null; }
  get hash() { return this.attributes.href.slice(this.attributes.href.indexOf("#")); }
  get value() { return this.chosen ?? ""; }
  set value(value) { this.chosen = value; }

  getAttribute(name) { return this.attributes[name] ?? null; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  removeAttribute(name) { delete this.attributes[name]; }

  append(...nodes) {
    for (const node of nodes) {
      if (node instanceof Element) {
        if (node.parent) node.parent.nodes = node.parent.nodes.filter((other) => other !== node);
        node.parent = this;
      }
      this.nodes.push(node);
    }
  }
  replaceChildren(...nodes) { this.nodes = []; this.append(...nodes); }

  // "tag.class[name=value]"; any other selector is an error.
  matches(part) {
    const pattern = /([a-z]+)|\.([-\w]+)|\[([-\w]+)(?:=([-\w]+))?\]/y;
    for (let found; pattern.lastIndex < part.length;) {
      found = pattern.exec(part);
      if (!found) throw new Error(`no selector: ${part}`);
      const [, tag, name, attribute, value] = found;
      if (tag && this.tag !== tag) return false;
      if (name && !this.classList.contains(name)) return false;
      if (attribute && !(attribute in this.attributes)) return false;
      if (value && this.attributes[attribute] !== value) return false;
    }
    return true;
  }
  closest(part) { return this.matches(part) ? this : this.parent ? this.parent.closest(part) : null; }
  querySelectorAll(selector) {
    let found = [this];
    for (const part of selector.split(" ")) {
      found = [...new Set(found.flatMap((element) => element.below().filter((other) => other.matches(part))))];
    }
    return found;
  }
  querySelector(selector) { return this.querySelectorAll(selector)[0] ?? null; }
  below() { return this.children.flatMap((child) => [child, ...child.below()]); }

  get isShown() { return !this.hidden && (!this.parent || this.parent.isShown); }
  get clientWidth() { return this.isShown ? PLOT_PIXELS : 0; }
  get scrollWidth() { return Math.round(this.clientWidth * Number.parseFloat(this.firstElementChild?.style.width ?? "100") / 100); }
  get scrollLeft() { return this.scrolledTo; }
  set scrollLeft(left) {
    const before = this.scrolledTo;
    this.scrolledTo = Math.round(Math.min(Math.max(left, 0), this.scrollWidth - this.clientWidth));
    if (this.scrolledTo !== before) frames.push(() => this.fire("scroll"));
  }
  getBoundingClientRect() { return { left: PLOT_LEFT, top: 0, width: PLOT_PIXELS, height: 20 }; }
  scrollIntoView() { windowListeners.shown = this; }
  focus() {}

  addEventListener(type, act) { (this.listeners[type] ??= []).push(act); }
  // Returns whether a listener prevented what the browser does by itself.
  fire(type, event = {}) {
    let isPrevented = false;
    Object.assign(event, { target: this, preventDefault: () => { isPrevented = true; } });
    for (let element = this; element; element = element.parent) {
      for (const act of element.listeners[type] ?? []) act(event);
    }
    return isPrevented;
  }
}

function built([tag, attributes, ...nodes]) {
  const element = new Element(tag, attributes);
  element.append(...nodes.map((node) => typeof node === "string" ? node : built(node)));
  return element;
}

const document = {
  open(tree) { this.root = built(tree); },
  querySelector(selector) { return this.root.querySelector(selector); },
  querySelectorAll(selector) { return this.root.querySelectorAll(selector); },
  createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
};
const location = { hash: "" };
const passed = [];
const history = { pushState: (_, __, hash) => { passed.push(location.hash); location.hash = hash; } };
const [innerWidth, innerHeight] = [1280, 900];
const addEventListener = (type, act) => { windowListeners[type] = act; };
const requestAnimationFrame = (draw) => frames.push(draw);
class ResizeObserver {
  constructor(act) { observers.push(act); }
  observe() {}
}

function settle() { while (frames.length) frames.shift()(); }
function goBack() { location.hash = passed.pop(); windowListeners.popstate(); settle(); }
function resize() { for (const act of observers) act(); settle(); }
const shownRank = () => document.querySelectorAll("section.rank").find((section) => !section.hidden);
const inRank = (selector) => shownRank().querySelectorAll(selector);
const views = () => inRank(".plot").map((plot) =>
  [plot.scrollLeft / plot.scrollWidth, plot.clientWidth / plot.scrollWidth]);
