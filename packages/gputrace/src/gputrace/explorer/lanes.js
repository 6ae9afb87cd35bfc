// The lanes of the explorer: spans of time, a device's memory, its blocks. Each draws itself and
// says what is at a place.
"use strict";

const HEIGHTS = { spans: 24, memory: 96, blocks: 180 };
// Pixels. Narrower spans are drawn together. The height of a column is the covered share of it.
const NARROW = 2;
const LEAST = 0.3; // of a lane's height: what is there is seen
const UNITS = [
  [1e9, "s"],
  [1e6, "ms"],
  [1e3, "µs"],
  [1, "ns"],
];

const summed = steps => {
  let at = 0;
  return Float64Array.from(steps, step => (at += step));
};
const short = number => String(Number(number.toPrecision(4)));

function timeText(nanoseconds) {
  const [size, unit] = UNITS.find(([size]) => nanoseconds >= size) ?? UNITS.at(-1);
  return `${short(nanoseconds / size)} ${unit}`;
}

function byteText(bytes) {
  const power = Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), 4);
  return `${short(bytes / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

// How many of the sorted numbers are at most `value`.
function countUpTo(sorted, value) {
  let low = 0,
    high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Finds the first of many intervals that may reach a moment. The intervals are in order of their
// start.
class Ends {
  constructor(ends) {
    let latest = -Infinity;
    this.latest = Float64Array.from(ends, end => (latest = Math.max(latest, end)));
  }

  // No interval before this one ends at `moment` or later.
  before(moment) {
    let low = 0,
      high = this.latest.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.latest[middle] < moment) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

class Spans {
  constructor(told, data) {
    Object.assign(this, {
      data,
      name: told.name,
      height: HEIGHTS.spans,
      called: told.called,
      look: told.look,
      stack: told.stack,
      nbytes: told.nbytes,
    });
    this.start = summed(told.start);
    this.end = this.start.map((start, index) => start + told.duration[index]);
    this.count = this.start.length;
    this.begins = new Ends(this.end);
  }

  // Work that waits for other work is drawn below it.
  draw(pen, area) {
    const shares = new Float32Array(Math.ceil(area.width) + 1),
      looks = new Uint8Array(shares.length);
    const first = this.begins.before(area.from),
      last = countUpTo(this.start, area.until);
    for (const under of [true, false]) {
      for (let index = first; index < last; index++) {
        const look = this.data.looks[this.look[index]];
        if (this.end[index] < area.from || look.under !== under) continue;
        const left = Math.max(area.x(this.start[index]), area.left),
          right = Math.min(area.x(this.end[index]), area.right);
        if (right - left < NARROW) {
          const column = Math.floor(left - area.left);
          shares[column] += Math.max(right - left, 0);
          looks[column] = this.look[index] + 1;
        } else this._bar(pen, area, look, left, right - left, index);
      }
    }
    for (let column = 0; column < shares.length; column++) {
      if (!looks[column]) continue;
      const high = this.height * Math.min(Math.max(shares[column], LEAST), 1);
      pen.box(
        this.data.looks[looks[column] - 1],
        area.left + column,
        area.top + this.height - high,
        1,
        high,
      );
    }
  }

  _bar(pen, area, look, left, width, index) {
    pen.box(look, left, area.top, width - 0.5, this.height);
    if (width > 24)
      pen.write(
        this.data.names[this.called[index]],
        left + 4,
        area.top + this.height / 2,
        width - 8,
        look,
      );
  }

  // What lies at a moment, or as near to it as `slack`: the shortest, for that is on top.
  at(moment, slack) {
    for (const near of [0, slack]) {
      let best = -1;
      const last = countUpTo(this.start, moment + near);
      for (let index = this.begins.before(moment - near); index < last; index++) {
        const shorter =
          best < 0 || this.end[index] - this.start[index] <= this.end[best] - this.start[best];
        if (this.end[index] >= moment - near && shorter) best = index;
      }
      if (best >= 0) return best;
    }
    return -1;
  }

  extent(index) {
    return [this.start[index], this.end[index]];
  }
  rows() {
    return [0, 1];
  }
  title(index) {
    return this.data.names[this.called[index]];
  }

  describe(index) {
    return [
      [this.data.looks[this.look[index]].name, this.title(index)],
      ["takes", timeText(this.end[index] - this.start[index])],
      ...(this.nbytes[index] ? [["moves", byteText(this.nbytes[index])]] : []),
      ["starts", `at ${timeText(this.start[index])}`],
      ["on", this.name],
    ];
  }
}

class Memory {
  constructor(told, data) {
    Object.assign(this, { data, told, name: `${told.name}allocated`, height: HEIGHTS.memory });
    this.time = summed(told.time);
    this.count = this.time.length + 1; // states: before the first event, and after each
    this.levels = told.base.map(bytes => new Float64Array(this.count).fill(bytes));
    this.total = new Float64Array(this.count);
    this.reserved = new Float64Array(this.count).fill(told.reserved);
    for (let state = 0; state < this.count; state++) {
      if (state) {
        this.levels.forEach(level => {
          level[state] = level[state - 1];
        });
        this.levels[told.category[state - 1]][state] += told.rise[state - 1];
        this.reserved[state] = this.reserved[state - 1] + told.reserve[state - 1];
      }
      this.total[state] = this.levels.reduce((sum, level) => sum + level[state], 0);
    }
    this.most = this.reserved.reduce(
      (most, bytes, state) => Math.max(most, bytes, this.total[state]),
      1,
    );
    this.stack = [0, ...told.stack];
  }

  // Each column of pixels shows the state in which most was allocated. Neighbouring columns of the
  // same state are one box.
  draw(pen, area) {
    const high = bytes => (this.height * bytes) / this.most;
    let begun = 0,
      before = -1;
    for (let column = 0; column <= area.width; column++) {
      const state =
        column < area.width
          ? this._highest(area.moment(area.left + column), area.moment(area.left + column + 1))
          : -1;
      if (state === before) continue;
      if (before >= 0) {
        let bottom = area.top + this.height;
        this.levels.forEach((level, category) => {
          if (level[before] > 0)
            pen.box(
              this.data.categories[category],
              area.left + begun,
              (bottom -= high(level[before])),
              column - begun,
              high(level[before]),
            );
        });
        pen.rule(
          area.left + begun,
          area.top + this.height - high(this.reserved[before]),
          column - begun,
        );
      }
      [begun, before] = [column, state];
    }
    pen.note(`${byteText(this.most)} reserved`, area.right - 4, area.top + 8);
  }

  _highest(from, until) {
    let best = countUpTo(this.time, from);
    for (let state = best + 1; state < this.count && this.time[state - 1] < until; state++)
      if (this.total[state] > this.total[best]) best = state;
    return best;
  }

  at(moment) {
    return countUpTo(this.time, moment);
  }
  extent(state) {
    return [
      state ? this.time[state - 1] : 0,
      state < this.time.length ? this.time[state] : this.data.end,
    ];
  }
  rows() {
    return [0, 1];
  }
  title(state) {
    return `${byteText(this.total[state])} allocated`;
  }

  describe(state) {
    const parts = this.levels
      .map((level, category) => [level[state], this.data.categories[category].name])
      .filter(([bytes]) => bytes > 0);
    const told = [
      ["allocated", byteText(this.total[state])],
      ["of which", parts.map(([bytes, name]) => `${byteText(bytes)} ${name}`).join(", ")],
      ["reserved", byteText(this.reserved[state])],
      ["since", timeText(this.extent(state)[0])],
    ];
    const rise = state ? this.told.rise[state - 1] : 0;
    return rise ? [...told, [rise > 0 ? "allocates" : "frees", byteText(Math.abs(rise))]] : told;
  }
}

class Blocks {
  constructor(told, data, memory) {
    Object.assign(this, {
      data,
      device: told.device,
      operator: told.operator,
      name: `${told.name}blocks`,
      height: HEIGHTS.blocks,
      ...told.blocks,
    });
    this.count = this.place.length;
    this.start = Float64Array.from(this.birth, event => (event < 0 ? 0 : memory.time[event]));
    this.end = Float64Array.from(this.death, event => (event < 0 ? data.end : memory.time[event]));
    this.begins = new Ends(this.end);
    this.bytes ||= 1;
    this.made = new Map(); // by each line of the user's: its blocks, and their bytes
    this.stack.forEach((stack, index) => {
      const line = data.users[stack];
      if (line < 0) return;
      const made = this.made.get(line) ?? { blocks: [], bytes: 0 };
      made.blocks.push(index);
      made.bytes += this.size[index];
      this.made.set(line, made);
    });
    this.squeeze(0, 1);
  }

  // Which share of the addresses is shown.
  squeeze(from, until) {
    const share = Math.min(Math.max(until - from, 64 / this.bytes), 1);
    this.low = Math.min(Math.max(from, 0), 1 - share);
    this.share = share;
  }

  // So many times the share, around a row of what is shown.
  stretch(times, row) {
    const from = this.low + row * this.share * (1 - times);
    this.squeeze(from, from + this.share * times);
  }

  // Blocks are drawn as pixels, which is fast also for a hundred thousand of them. If a line is
  // pinned, blocks of other lines are pale.
  draw(pen, area, pinnedLine) {
    const width = Math.ceil(area.width),
      height = this.height;
    const picture = new ImageData(width, height),
      pixels = new Uint32Array(picture.data.buffer);
    const scale = (area.right - area.left) / (area.until - area.from),
      unit = height / (this.bytes * this.share),
      lowest = this.low * this.bytes;
    const last = countUpTo(this.start, area.until);
    for (let index = this.begins.before(area.from); index < last; index++) {
      const high = (this.place[index] - lowest) * unit,
        deep = high + this.size[index] * unit;
      if (this.end[index] < area.from || deep <= 0 || high >= height) continue;
      const left = Math.max(Math.floor((this.start[index] - area.from) * scale), 0),
        until = Math.floor((this.end[index] - area.from) * scale) - 1,
        right = Math.min(Math.max(until, left), width - 1);
      const top = Math.max(Math.floor(high), 0),
        bottom = Math.min(Math.floor(deep), height - 1);
      // A seam below those that are high enough.
      const end = Math.max(bottom - (bottom - top > 3 ? 1 : 0), top);
      const { solid, pale, hatch } = this.data.categories[this.category[index]];
      const others = pinnedLine >= 0 && this.data.users[this.stack[index]] !== pinnedLine;
      const colour = others ? pale : solid;
      for (let row = top; row <= end; row++) {
        const begun = row * width;
        if (left === right) pixels[begun + left] = colour;
        else if (!hatch) pixels.fill(colour, begun + left, begun + right + 1);
        else
          for (let column = left; column <= right; column++)
            pixels[begun + column] = (column + row) % 6 || end - top < 4 ? colour : pale;
      }
    }
    pen.picture(picture, area.left, area.top);
    pen.note(`${byteText(this.bytes * this.share)} of addresses`, area.right - 4, area.top + 8);
  }

  at(moment, slack, row) {
    let best = -1;
    const last = countUpTo(this.start, moment + slack);
    for (let index = this.begins.before(moment - slack); index < last; index++) {
      const [top, bottom] = this.rows(index),
        edge = 1 / this.height;
      const nearer = best < 0 || this.size[index] <= this.size[best];
      if (
        this.end[index] >= moment - slack &&
        row >= top &&
        row <= Math.max(bottom, top + edge) &&
        nearer
      )
        best = index;
    }
    return best;
  }

  extent(index) {
    return [this.start[index], this.end[index]];
  }
  rows(index) {
    return [this.place[index], this.place[index] + this.size[index]].map(
      byte => (byte / this.bytes - this.low) / this.share,
    );
  }
  title(index) {
    return `${byteText(this.size[index])} ${this.data.categories[this.category[index]].name}`;
  }

  describe(index) {
    const operator = this.birth[index] < 0 ? -1 : this.operator[this.birth[index]];
    const [start, end] = this.extent(index);
    const { blocks = [], bytes = 0 } = this.made.get(this.data.users[this.stack[index]]) ?? {};
    const told = [
      ["block", `${this.title(index)}, ${byteText(this.asked[index])} asked for`],
      ...(operator < 0 ? [] : [["for", this.data.names[operator]]]),
      [
        "lives",
        [
          this.birth[index] < 0 ? "from before the start" : `from ${timeText(start)}`,
          this.death[index] < 0 ? "to the end" : `for ${timeText(end - start)}`,
        ].join(" "),
      ],
      ["on", this.name],
    ];
    return blocks.length > 1
      ? [...told, ["its line", `made ${blocks.length} blocks, ${byteText(bytes)} in all`]]
      : told;
  }
}
