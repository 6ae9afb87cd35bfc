// The explorer of a trace: one canvas for all lanes, with a view in time that zooms and pans.
// It describes what is under the pointer or chosen with the keyboard.

const AXIS = 24,
  GAP = 6,
  LABELS = 0.2,
  SHORTEST = 10; // pixels, pixels, of the width, nanoseconds
const KEYS =
  "Arrow keys left and right pan, + and − zoom, 0 shows all. Up and down choose a lane, comma and " +
  "full stop step through it, N goes to the next from the same line, R to the next race, Enter zooms to what is " +
  "chosen, Escape lets it go. T and F make blocks taller and flatter. " +
  "With the pointer: drag, and turn the wheel after " +
  "a click, or with Ctrl; over blocks, with Shift, it makes them taller.";

function make(parent, tag, properties = {}, attributes = {}) {
  const element = Object.assign(document.createElement(tag), properties);
  Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
  parent.append(element);
  return element;
}

async function unpacked(element) {
  const packed = Uint8Array.from(atob(element.textContent.trim()), letter => letter.charCodeAt(0));
  return new Response(
    new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip")),
  ).arrayBuffer();
}

class Explorer {
  constructor(root, data) {
    this.data = {
      ...data,
      looks: data.looks.map(prepared),
      categories: data.categories.map(prepared),
    };
    this.lanes = data.lanes.flatMap(told => {
      if (told.what === "spans") return [new Spans(told, this.data)];
      const memory = new Memory(told, this.data);
      return [memory, new Blocks(told, this.data, memory)];
    });
    this.view = { from: 0, until: data.end };
    this.chosen = this.hovered = null; // { lane, index }
    this.links = new Links(this);
    this._build(root);
    this._listen();
    this.links.offer();
    for (const graph of document.querySelectorAll(".flame[data-device]")) {
      new Flame(graph, data.flames[graph.dataset.device]);
    }
    this.tables = new LineTables(this);
    new ResizeObserver(() => this.refresh()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.refresh());
  }

  _build(root) {
    const bar = make(root, "div", { className: "bar" }, { role: "toolbar", "aria-label": "View" });
    const button = (text, label, does) =>
      make(
        bar,
        "button",
        { textContent: text, onclick: does, type: "button" },
        { "aria-label": label, title: label },
      );
    button("◀", "Earlier", () => this.pan(-0.25));
    button("▶", "Later", () => this.pan(0.25));
    button("+", "Zoom in", () => this.zoom(0.5));
    button("−", "Zoom out", () => this.zoom(2));
    button("All", "Show all", () => this.all());
    if (this.links.races.length) button("Race", "Next race", () => this.links.next());
    this.search = new Search(this, bar);
    const legend = make(root, "div", { className: "legend" });
    const frame = make(root, "div", { className: "frame" });
    this.canvas = make(
      frame,
      "canvas",
      { tabIndex: 0 },
      { role: "application", "aria-label": `What ran when, and the blocks of memory. ${KEYS}` },
    );
    this.tip = make(frame, "div", { className: "tip", hidden: true }, { "aria-hidden": "true" });
    this.panel = make(root, "div", { className: "chosen" }, { "aria-live": "polite" });
    const folded = make(root, "details", { className: "words" });
    make(folded, "summary", { textContent: "What each word means" });
    this._legend(legend, folded);
    make(make(root, "details"), "summary", { textContent: "Keys and pointer" }).after(KEYS);
    this.pen = new Pen(this.canvas);
    this.tell();
  }

  // The colours in use, and in a folded list what each word means.
  _legend(parent, folded) {
    const used = (name, lanes, looks) =>
      looks.filter((_, number) => lanes.some(lane => lane[name].includes(number)));
    const spans = this.lanes.filter(lane => lane instanceof Spans),
      blocks = this.lanes.filter(lane => lane instanceof Blocks);
    const kinds = new Set(this.data.links.map(link => link.kind));
    const lines = this.data.lineLooks.filter(look => kinds.has(look.kind));
    const words = make(folded, "dl");
    const explain = look => {
      make(words, "dt", { textContent: look.name });
      make(words, "dd", { textContent: look.means });
    };
    for (const [title, looks] of [
      ["Time:", [...used("look", spans, this.data.looks), ...lines]],
      ["Memory:", used("category", blocks, this.data.categories)],
    ]) {
      if (looks.length) make(parent, "b", { textContent: title }); // the two share colours
      for (const look of looks) {
        const entry = make(parent, "span", { textContent: look.name, title: look.means });
        const size = { width: 14, height: 14 };
        const pen = new Pen(make(entry, "canvas", size, { "aria-hidden": "true" }));
        if (look.kind) pen.sample(look.kind);
        else pen.box(look, 0, 0, 14, 14);
        explain(look);
      }
    }
    if (blocks.length) this.data.memoryWords.forEach(explain);
  }

  refresh() {
    if (!this.asked)
      this.asked = requestAnimationFrame(() => {
        this.asked = 0;
        this.draw();
      });
  }

  // What is drawn

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    this.left = Math.round(Math.min(Math.max(width * LABELS, 104), 150));
    this.scale = (width - this.left) / (this.view.until - this.view.from);
    let top = AXIS;
    for (const lane of this.lanes) {
      lane.top = top;
      top += lane.height + GAP;
    }
    this.pen.begin(width, top);
    this._axis(width, top);
    const pinned = this.chosen ? this.data.users[this.chosen.lane.stack[this.chosen.index]] : -1;
    const area = {
      left: this.left,
      right: width,
      width: width - this.left,
      from: this.view.from,
      until: this.view.until,
      x: moment => this.x(moment),
      moment: x => this.moment(x),
    };
    for (const lane of this.lanes) {
      this.pen.write(lane.name, 0, lane.top + Math.min(lane.height / 2, 14), this.left - 6);
      this.pen.ground(this.left, lane.top, width - this.left, lane.height);
      lane.draw(this.pen, { ...area, top: lane.top }, pinned);
    }
    this.links.draw(this.pen);
    for (const item of [this.hovered, this.chosen]) if (item) this._outline(item, width);
    Object.assign(this.canvas.dataset, {
      drawn: this.pen.drawn,
      from: this.view.from,
      until: this.view.until,
    });
  }

  x(moment) {
    return this.left + (moment - this.view.from) * this.scale;
  }
  moment(x) {
    return this.view.from + (x - this.left) / this.scale;
  }

  _axis(width, height) {
    const length = this.view.until - this.view.from,
      wanted = length / Math.max(Math.floor((width - this.left) / 110), 1);
    const power = 10 ** Math.floor(Math.log10(wanted)),
      step = power * [1, 2, 5, 10].find(times => times * power >= wanted);
    const [size, unit] = UNITS.find(([size]) => this.view.until >= size) ?? UNITS.at(-1);
    const digits = Math.min(Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9)), 9);
    for (
      let tick = Math.ceil(this.view.from / step) * step;
      tick <= this.view.until;
      tick += step
    ) {
      const text = `${(tick / size).toFixed(digits)} ${unit}`,
        x = this.x(tick);
      if (x + this.pen.to.measureText(text).width < width)
        this.pen.write(text, x + 3, AXIS / 2, width);
      this.pen.ground(x, 0, 1, height);
    }
  }

  _outline({ lane, index }, width) {
    const [start, end] = lane
      .extent(index)
      .map(moment => Math.min(Math.max(this.x(moment), this.left), width));
    const [top, bottom] = lane.rows(index).map(row => Math.min(Math.max(row, 0), 1) * lane.height);
    if (lane.extent(index)[1] < this.view.from || lane.extent(index)[0] > this.view.until) return;
    this.pen.outline(start, lane.top + top, Math.max(end - start, 1), Math.max(bottom - top, 2));
  }

  // Where one looks

  show(from, until) {
    const length = Math.min(Math.max(until - from, SHORTEST), this.data.end),
      start = Math.min(Math.max(from, 0), this.data.end - length);
    this.view = { from: start, until: start + length };
    this.refresh();
  }

  all() {
    for (const lane of this.lanes) lane.squeeze?.(0, 1);
    this.show(0, this.data.end);
  }

  // All lanes of blocks; that of the chosen one around it.
  stretch(times) {
    for (const lane of this.lanes) {
      const [top, bottom] = this.chosen?.lane === lane ? lane.rows(this.chosen.index) : [0, 1];
      lane.stretch?.(times, (top + bottom) / 2);
    }
    this.refresh();
  }

  pan(share) {
    const by = share * (this.view.until - this.view.from);
    this.show(this.view.from + by, this.view.until + by);
  }

  zoom(times, around = this._middle()) {
    this.show(
      around - (around - this.view.from) * times,
      around + (this.view.until - around) * times,
    );
  }

  _middle() {
    const extent = this.chosen?.lane.extent(this.chosen.index);
    return extent && extent[1] >= this.view.from && extent[0] <= this.view.until
      ? Math.min(Math.max((extent[0] + extent[1]) / 2, this.view.from), this.view.until)
      : this._center();
  }

  // What is chosen

  choose(lane, index, follow = true) {
    this.chosen = lane && index >= 0 ? { lane, index } : null;
    const [start, end] = this.chosen ? lane.extent(index) : [this.view.from, this.view.until];
    if (follow && (end < this.view.from || start > this.view.until))
      this.pan(((start + end) / 2 - this._center()) / (this.view.until - this.view.from));
    this.tell();
    this.refresh();
    if (!follow || !this.chosen) return;
    const top = this.canvas.getBoundingClientRect().top + lane.top,
      room = innerHeight - this.panel.offsetHeight;
    if (top < 0 || top + lane.height > room) scrollBy(0, top - room / 3);
  }

  _center() {
    return (this.view.from + this.view.until) / 2;
  }

  step(by) {
    const { lane, index } = this.chosen ?? { lane: this.lanes[0], index: -1 };
    if (lane) this.choose(lane, Math.min(Math.max(index + by, 0), lane.count - 1));
  }

  // The next in the lane from the line of the chosen one; after the last comes the first.
  stepOnLine() {
    if (!this.chosen) return;
    const { lane, index } = this.chosen,
      lineOf = at => this.data.users[lane.stack[at]];
    let next = (index + 1) % lane.count;
    while (lineOf(next) !== lineOf(index)) next = (next + 1) % lane.count;
    this.choose(lane, next);
  }

  changeLane(by) {
    const at = this.chosen
      ? this.lanes.indexOf(this.chosen.lane) + by
      : by > 0
        ? 0
        : this.lanes.length - 1;
    const lane = this.lanes[Math.min(Math.max(at, 0), this.lanes.length - 1)],
      moment = this._middle();
    let nearest = -1,
      least = Infinity;
    for (let index = 0; index < (lane?.count ?? 0); index++) {
      const [start, end] = lane.extent(index),
        far = Math.max(start - moment, moment - end, 0);
      if (far < least) [nearest, least] = [index, far];
    }
    this.choose(lane, nearest);
  }

  zoomToChosen() {
    if (!this.chosen) return;
    const [start, end] = this.chosen.lane.extent(this.chosen.index),
      margin = Math.max(end - start, SHORTEST) / 2;
    this.show(start - margin, end + margin);
    if (this.chosen.lane.place) {
      const [top, bottom] = this.chosen.lane.rows(this.chosen.index);
      this.chosen.lane.stretch(Math.min(7 * (bottom - top), 1), (top + bottom) / 2);
    }
  }

  lineOf(lane, index) {
    const line = this.data.lines[this.data.users[lane.stack[index]]];
    return line ? `${line[0]}  ${line[2]}`.trim() : "";
  }

  describe({ lane, index }) {
    const line = this.lineOf(lane, index);
    return line ? [...lane.describe(index), ["line", line]] : lane.describe(index);
  }

  // What is read of it

  tell(
    instead = "Click on something, or choose it by keyboard, and what is known of it stays here.",
  ) {
    this.panel.replaceChildren();
    if (!this.chosen) {
      make(this.panel, "p", { textContent: instead });
      return;
    }
    this._list(this.panel, this.describe(this.chosen));
    const row = this.tables.buttonFor(this.chosen);
    if (row)
      make(this.panel, "button", {
        type: "button",
        textContent: "Its line in the table",
        onclick: () => row.focus(),
      });
    const stack = this.data.stacks[this.chosen.lane.stack[this.chosen.index]] ?? [];
    if (!stack.length) return;
    const folded = make(this.panel, "details"),
      lines =
        (make(folded, "summary", { textContent: `All ${stack.length} calls, the innermost first` }),
        make(folded, "ol"));
    for (const number of stack) {
      const [location, called, text] = this.data.lines[number];
      make(lines, "li", { textContent: `${location} in ${called}  ${text}`.trim() });
    }
  }

  describeRows(rows) {
    this.panel.replaceChildren();
    this._list(this.panel, rows);
  }

  _list(parent, rows) {
    const list = make(parent, "dl");
    for (const [term, text] of rows) {
      make(list, "dt", { textContent: term });
      make(list, "dd", { textContent: text });
    }
  }

  _hover(event) {
    const found = event ? this._under(event) : null;
    if (found?.lane !== this.hovered?.lane || found?.index !== this.hovered?.index) {
      this.hovered = found;
      this.tip.replaceChildren();
      if (found) this._list(this.tip, this.describe(found));
      this.refresh();
    }
    this.tip.hidden = !found;
    if (!found) return;
    const box = this.canvas.getBoundingClientRect(),
      x = event.clientX - box.left,
      y = event.clientY - box.top;
    const furthest = box.width - this.tip.offsetWidth - 4;
    this.tip.style.left = `${Math.max(Math.min(x + 14, furthest), 0)}px`;
    this.tip.style.top = `${y + 18}px`;
  }

  _laneAt(event) {
    const box = this.canvas.getBoundingClientRect(),
      x = event.clientX - box.left,
      y = event.clientY - box.top;
    const lane = this.lanes.find(lane => y >= lane.top && y < lane.top + lane.height);
    return lane && x >= this.left
      ? { lane, moment: this.moment(x), row: (y - lane.top) / lane.height }
      : null;
  }

  _under(event) {
    const { lane, moment, row } = this._laneAt(event) ?? {};
    const index = lane ? lane.at(moment, 3 / this.scale, row) : -1;
    return index < 0 ? null : { lane, index };
  }

  _listen() {
    const fingers = new Map(),
      canvas = this.canvas;
    let moved = 0;
    canvas.addEventListener("pointerdown", event => {
      fingers.set(event.pointerId, event.clientX);
      canvas.setPointerCapture(event.pointerId);
      moved = fingers.size > 1 ? Infinity : 0;
    });
    canvas.addEventListener("pointermove", event => {
      if (!fingers.has(event.pointerId)) {
        this._hover(event);
        return;
      }
      const before = [...fingers.values()];
      fingers.set(event.pointerId, event.clientX);
      const now = [...fingers.values()],
        by = event.clientX - before[[...fingers.keys()].indexOf(event.pointerId)];
      moved += Math.abs(by);
      if (now.length === 2) {
        const apart = ([one, other]) => Math.max(Math.abs(one - other), 10);
        this.zoom(
          apart(before) / apart(now),
          this.moment((now[0] + now[1]) / 2 - canvas.getBoundingClientRect().left),
        );
      } else if (moved > 3) {
        this._hover(null);
        this.show(this.view.from - by / this.scale, this.view.until - by / this.scale);
      }
    });
    canvas.addEventListener("pointerup", event => {
      if (fingers.delete(event.pointerId) && moved <= 3) {
        const found = this._under(event);
        this.choose(found?.lane, found?.index, false);
      }
    });
    canvas.addEventListener("pointercancel", event => fingers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => this._hover(null));
    canvas.addEventListener(
      "wheel",
      event => {
        // Otherwise one could not scroll past the explorer.
        if (!event.ctrlKey && document.activeElement !== canvas) return;
        event.preventDefault();
        const found = event.shiftKey && this._laneAt(event);
        if (found && found.lane.place) {
          found.lane.stretch(1.002 ** (event.deltaY || event.deltaX), found.row);
          this.refresh();
        } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / 1000);
        else
          this.zoom(
            1.002 ** event.deltaY,
            this.moment(event.clientX - canvas.getBoundingClientRect().left),
          );
        this._hover(event);
      },
      { passive: false },
    );
    canvas.addEventListener("keydown", event => {
      const does = {
        ArrowLeft: () => this.pan(-0.1),
        ArrowRight: () => this.pan(0.1),
        ArrowUp: () => this.changeLane(-1),
        ArrowDown: () => this.changeLane(1),
        "+": () => this.zoom(0.7),
        "=": () => this.zoom(0.7),
        "-": () => this.zoom(1 / 0.7),
        0: () => this.all(),
        ",": () => this.step(-1),
        ".": () => this.step(1),
        n: () => this.stepOnLine(),
        r: () => this.links.next(),
        Enter: () => this.zoomToChosen(),
        Escape: () => this.choose(null),
        t: () => this.stretch(0.7),
        f: () => this.stretch(1 / 0.7),
      }[event.key];
      if (!does || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      this._hover(null);
      does();
    });
  }
}

// What the page brings: the columns of a trace, and files to download. If the browser is too old
// for any of it, the picture stays.

function offer(button) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const content = await unpacked(document.getElementById(button.dataset.file));
    const address = URL.createObjectURL(new Blob([content]));
    const link = make(document.body, "a", {
      href: address,
      download: button.dataset.name,
      hidden: true,
    });
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
  });
}

for (const root of document.querySelectorAll(".explorer")) {
  unpacked(root.querySelector("script")).then(columns => {
    root.explorer = new Explorer(root, JSON.parse(new TextDecoder().decode(columns)));
    root.hidden = false;
    root.querySelectorAll("button[data-file]").forEach(offer);
    const picture = root.nextElementSibling;
    if (picture?.tagName === "DETAILS") picture.open = false;
  });
}
