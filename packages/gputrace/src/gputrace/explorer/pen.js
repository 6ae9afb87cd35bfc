// The pen of all lanes. It draws boxes with a colour and a hatching, text, and pictures made of
// pixels, and counts them.

class Pen {
  constructor(canvas) {
    this.canvas = canvas;
    this.to = canvas.getContext("2d");
    this.patterns = new Map();
  }

  begin(width, height) {
    const ratio = window.devicePixelRatio || 1,
      style = getComputedStyle(this.canvas);
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.to.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.to.font = "12px system-ui, sans-serif";
    this.to.textBaseline = "middle";
    [this.ink, this.faint] = ["--ink", "--faint"].map(name => style.getPropertyValue(name));
    this.drawn = 0;
  }

  box(look, x, y, width, height) {
    this.drawn++;
    this.to.fillStyle = look.hatch && width > 3 ? this._pattern(look) : look.colour;
    this.to.fillRect(x, y, width, height);
  }

  _pattern(look) {
    if (!this.patterns.has(look)) {
      const tile = document.createElement("canvas"),
        to = tile.getContext("2d");
      tile.width = tile.height = 6;
      to.fillStyle = look.colour;
      to.fillRect(0, 0, 6, 6);
      to.strokeStyle = to.fillStyle = look.light ? "#0006" : "#fff9";
      if (look.hatch === ".") to.fillRect(2, 2, 2, 2);
      to.beginPath();
      if ("/x".includes(look.hatch)) {
        to.moveTo(-1, 7);
        to.lineTo(7, -1);
      }
      if ("\\x".includes(look.hatch)) {
        to.moveTo(-1, -1);
        to.lineTo(7, 7);
      }
      to.stroke();
      this.patterns.set(look, this.to.createPattern(tile, "repeat"));
    }
    return this.patterns.get(look);
  }

  write(text, x, y, room, look) {
    const dark = look ? look.light : null;
    const shown =
      this.to.measureText(text).width <= room
        ? text
        : `${text.slice(0, Math.floor(room / 7) - 1)}…`;
    if (shown.length < Math.min(text.length, 3)) return;
    if (look?.hatch) {
      this.to.fillStyle = look.colour;
      this.to.fillRect(x - 2, y - 8, this.to.measureText(shown).width + 4, 16);
    }
    this.to.fillStyle = look ? (dark ? "#000" : "#fff") : this.ink;
    this.to.fillText(shown, x, y);
  }

  note(text, right, y) {
    const width = this.to.measureText(text).width;
    this.to.fillStyle = this.faint;
    this.to.fillRect(right - width - 3, y - 8, width + 6, 16);
    this.to.fillStyle = this.ink;
    this.to.fillText(text, right - width, y);
  }

  rule(x, y, width) {
    this.to.fillStyle = this.ink;
    this.to.fillRect(x, y - 1, width, 1.5);
  }
  ground(x, y, width, height) {
    this.to.fillStyle = this.faint;
    this.to.fillRect(x, y, width, height);
  }
  outline(x, y, width, height, colour = this.ink) {
    this.to.strokeStyle = colour;
    this.to.lineWidth = 2;
    this.to.strokeRect(x, y, width, height);
  }

  line(from, to, colour, width, dashes = []) {
    this.drawn++;
    this.to.strokeStyle = colour;
    this.to.lineWidth = width;
    this.to.setLineDash(dashes);
    this.to.beginPath();
    this.to.moveTo(...from);
    this.to.lineTo(...to);
    this.to.stroke();
    this.to.setLineDash([]);
  }

  arrow(from, to, colour, width) {
    this.line(from, to, colour, width);
    const [x, y] = to,
      size = 3 + 2 * width,
      angle = Math.atan2(y - from[1], x - from[0]);
    this.to.fillStyle = colour;
    this.to.beginPath();
    this.to.moveTo(x, y);
    for (const turn of [-0.4, 0.4]) {
      this.to.lineTo(x - size * Math.cos(angle + turn), y - size * Math.sin(angle + turn));
    }
    this.to.fill();
  }

  // A line of the legend.
  sample(kind) {
    const colour = kind === "race" ? RACE : "#1b1b1b";
    this.to.fillStyle = "#fff";
    this.to.fillRect(0, 0, 14, 14);
    if (kind === "collective") this.line([7, 0], [7, 14], colour, 1.5, [2, 2]);
    else this.arrow([1, 2], [12, 12], colour, kind === "race" ? 2 : 1);
  }

  badge(text, x, y, colour) {
    this.to.fillStyle = colour;
    this.to.beginPath();
    this.to.arc(x, y, 9, 0, 2 * Math.PI);
    this.to.fill();
    this.to.fillStyle = "#fff";
    this.to.textAlign = "center";
    this.to.fillText(text, x, y);
    this.to.textAlign = "start";
  }

  picture(picture, x, y) {
    const own = Object.assign(document.createElement("canvas"), {
      width: picture.width,
      height: picture.height,
    });
    own.getContext("2d").putImageData(picture, 0, 0);
    this.to.imageSmoothingEnabled = false;
    this.to.drawImage(own, x, y);
    this.drawn++;
  }
}

// A colour as a pixel of a picture, and whether it is so light that black is read on it.
function prepared(look) {
  const [red, green, blue] =
    look.colour === "white"
      ? [255, 255, 255]
      : [1, 3, 5].map(at => parseInt(look.colour.slice(at, at + 2), 16));
  const pixel = alpha => ((alpha << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  return {
    ...look,
    light: 0.3 * red + 0.59 * green + 0.11 * blue > 130,
    solid: pixel(255),
    pale: pixel(70),
  };
}
