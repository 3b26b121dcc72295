// A strip chart of all runs: tokens/s, acceptance length and draft wait over the time of a run.

const TRACKS = [
  { name: "tokens/s", value: (bin) => bin.tokens / bin.seconds },
  { name: "acceptance length", value: (bin) => (bin.rounds ? bin.committed / bin.rounds : null) },
  { name: "draft wait, ms per round", value: (bin) => (bin.rounds ? bin.waitMs / bin.rounds : null) },
];
const DASHES = [[], [6, 3], [2, 2], [8, 2, 2, 2]];
const BINS = 48;

export class Chart {
  #asked = false;

  constructor(canvas) {
    this.canvas = canvas;
    this.runs = [];
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // `runs`: objects with `name`, `colour` (a number) and `samples`: { ms, tokens: [...] } of each event.
  show(runs) {
    this.runs = runs;
    this.draw();
  }

  draw() {
    if (this.#asked) return;
    this.#asked = true;
    requestAnimationFrame(() => {
      this.#asked = false;
      this.#paint();
    });
  }

  describe(text) {
    this.canvas.setAttribute("aria-label", text);
  }

  #paint() {
    const { canvas } = this;
    const scale = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = "12px system-ui, sans-serif";
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const endMs = Math.max(1, ...this.runs.flatMap((run) => run.samples.slice(-1).map((sample) => sample.ms)));
    const binned = this.runs.map((run) => binsOf(run.samples, endMs));
    const trackHeight = height / TRACKS.length;
    TRACKS.forEach((track, row) => {
      const series = binned.map((bins) => bins.map(track.value));
      const most = Math.max(1e-9, ...series.flat().filter((value) => value !== null));
      const top = row * trackHeight + 18;
      const bottom = (row + 1) * trackHeight - 4;
      context.setLineDash([]);
      context.strokeStyle = colour("line");
      context.strokeRect(0.5, top, width - 1, bottom - top);
      context.fillStyle = colour("text");
      const known = series.some((values) => values.some((value) => value !== null));
      context.fillText(known ? `${track.name}, up to ${Number(most.toPrecision(3))}` : track.name, 2, top - 5);
      series.forEach((values, number) => {
        context.strokeStyle = colour(`run-${this.runs[number].colour}`);
        context.setLineDash(DASHES[this.runs[number].colour]);
        context.lineWidth = 2;
        context.beginPath();
        values.forEach((value, i) => {
          if (value !== null) context.lineTo(((i + 0.5) / BINS) * width, bottom - (value / most) * (bottom - top - 3));
        });
        context.stroke();
        context.lineWidth = 1;
      });
    });
  }
}

// Samples by equal parts of the time.
function binsOf(samples, endMs) {
  const seconds = endMs / 1000 / BINS;
  const last = samples.length ? Math.min(BINS, Math.max(1, Math.ceil((samples.at(-1).ms / endMs) * BINS))) : 0;
  const bins = Array.from({ length: last }, () => ({ seconds, tokens: 0, rounds: 0, committed: 0, waitMs: 0 }));
  let before = 0;
  for (const { ms, tokens } of samples) {
    const bin = bins[Math.min(last - 1, Math.floor((ms / endMs) * BINS))];
    bin.tokens += tokens.length;
    for (const token of tokens) {
      if (!token.round) continue;
      bin.committed += 1;
      if (token.round !== before) {
        bin.rounds += 1;
        bin.waitMs += token.draft_wait_ns / 1e6;
      }
      before = token.round;
    }
  }
  return bins;
}
