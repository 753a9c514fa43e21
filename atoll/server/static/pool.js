// The pool as a canvas, a cell for each page; paints only what has changed. Knows no server.

const PITCHES_PX = [14, 12, 10, 9, 8, 7, 6, 5, 4, 3, 2]; // of cells, with the gap between them; the largest that fits is taken
const MAX_SHOWN_PX = 320; // height, beyond which smaller cells are taken, and then a scrolled canvas
const MAX_CANVAS_PX = 8000; // height; beyond it a cell stands for several pages
const FREE = ".";

export const KINDS = {
  free: "holds nothing; what its bytes are, nobody can tell",
  kv: "rows of a running request, not yet a full page that is indexed",
  indexed: "full of computed rows and found by the prefix cache: whoever begins alike reuses it",
  leased: "being loaded from a tier, or about to be: nobody reads it, and nobody gets it",
  image: "part of a checkpoint: a recurrent state, laid over pages of the pool",
  null: "page 0: never handed out, named by every padded lane",
};

export class PoolCanvas {
  constructor(canvas, name) {
    this.canvas = canvas;
    this.name = name;
    this.context = canvas.getContext("2d");
    this.pages = "";
    this.kinds = {};
    this.cursor = null; // the cell that is pointed at
    canvas.addEventListener("pointermove", (event) => this.point(this.cellAt(event)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("focus", () => this.cursor === null && this.point(0));
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.layOut()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.layOut());
  }

  /** Show `pages`, a letter for each; `kinds` says what the letters mean. */
  show(pages, kinds) {
    const before = this.pages;
    this.pages = pages;
    this.kinds = kinds;
    if (before.length !== pages.length) this.layOut();
    else if (before !== pages) {
      for (let cell = 0; cell < this.numCells; cell++) {
        if (this.changed(before, cell)) this.paint(cell);
      }
    }
    this.tell();
  }

  changed(before, cell) {
    const first = cell * this.pagesPerCell;
    for (let page = first; page < first + this.pagesPerCell; page++) {
      if (before[page] !== this.pages[page]) return true;
    }
    return false;
  }

  layOut() {
    const width = this.canvas.parentElement.clientWidth;
    const numPages = this.pages.length;
    if (!width || !numPages) return;
    const rows = (pitch) => Math.ceil(numPages / columnsOf(width, pitch));
    this.pitch = PITCHES_PX.find((pitch) => rows(pitch) * pitch <= MAX_SHOWN_PX) ?? PITCHES_PX.at(-1);
    this.gap = gapOf(this.pitch);
    this.columns = columnsOf(width, this.pitch);
    this.pagesPerCell = Math.ceil(numPages / (this.columns * Math.floor(MAX_CANVAS_PX / this.pitch)));
    this.numCells = Math.ceil(numPages / this.pagesPerCell);
    const height = Math.ceil(this.numCells / this.columns) * this.pitch;
    const ratio = devicePixelRatio;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(document.documentElement);
    this.colours = {};
    for (const [letter, kind] of Object.entries(this.kinds)) this.colours[letter] = style.getPropertyValue(`--${kind}`);
    this.cursorColour = style.getPropertyValue("--text");
    for (let cell = 0; cell < this.numCells; cell++) this.paint(cell);
  }

  paint(cell) {
    const { context, pitch, gap, columns } = this;
    const x = (cell % columns) * pitch;
    const y = Math.floor(cell / columns) * pitch;
    const size = pitch - gap;
    context.clearRect(x, y, pitch, pitch);
    context.fillStyle = this.colours[this.letter(cell)];
    context.beginPath();
    context.roundRect(x, y, size, size, pitch >= 9 ? 2 : 0);
    context.fill();
    if (cell === this.cursor) {
      context.strokeStyle = this.cursorColour;
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, size - 2, size - 2);
    }
  }

  /** What a cell shows: of several pages, the first that is not free. */
  letter(cell) {
    const first = cell * this.pagesPerCell;
    const pages = this.pages.slice(first, first + this.pagesPerCell);
    for (const letter of pages) if (letter !== FREE) return letter;
    return FREE;
  }

  cellAt(event) {
    const column = Math.floor(event.offsetX / this.pitch);
    const cell = Math.floor(event.offsetY / this.pitch) * this.columns + column;
    return column < this.columns && cell >= 0 && cell < this.numCells ? cell : null;
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.point(Math.min(this.numCells - 1, Math.max(0, (this.cursor ?? 0) + steps[event.key])));
  }

  point(cell) {
    const before = this.cursor;
    if (cell === before) return;
    this.cursor = cell;
    if (before !== null) this.paint(before);
    if (cell !== null) this.paint(cell);
    this.tell();
  }

  tell() {
    this.name.textContent = this.cursor === null ? "Point at a cell, or use the arrow keys, to see what its page is for." : this.describe(this.cursor);
  }

  describe(cell) {
    const first = cell * this.pagesPerCell;
    const last = Math.min(this.pages.length, first + this.pagesPerCell) - 1;
    const kind = this.kinds[this.letter(cell)];
    const where = first === last ? `Page ${first}` : `Pages ${first} to ${last}`;
    return KINDS[kind] ? `${where}, ${kind}: ${KINDS[kind]}.` : `${where}, ${kind}.`;
  }
}

function gapOf(pitch) {
  return pitch >= 7 ? 2 : pitch >= 4 ? 1 : 0;
}

function columnsOf(width, pitch) {
  return Math.floor((width + gapOf(pitch)) / pitch);
}
