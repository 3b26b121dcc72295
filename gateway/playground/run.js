// One run: its options, its text and its figures.

import { TokenView, tokensOf } from "./tokens.js";

const SERVERS = ["", "the server's choice"];
const LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64];

export class Run {
  constructor(template, number, { remove }) {
    this.element = template.content.firstElementChild.cloneNode(true);
    this.colour = number;
    this.name = `Run ${"ABCD"[number]}`;
    this.samples = [];
    this.text = "";
    this.isDone = false;
    const find = (selector) => this.element.querySelector(selector);
    this.element.style.setProperty("--colour", `var(--run-${number})`);
    find("h2").textContent = this.name;
    find(".output").setAttribute("aria-label", `Text of ${this.name}; arrow keys move from token to token`);
    this.method = find("[name=method]");
    this.method.addEventListener("change", () => this.#offerLengths());
    this.k = find("[name=k]");
    this.rule = find("[name=rule]");
    this.error = find(".error");
    this.facts = find(".facts");
    this.tokens = new TokenView(find(".output"), find(".token-details"));
    find(".remove").addEventListener("click", () => remove(this));
    find(".remove").setAttribute("aria-label", `Remove ${this.name}`);
  }

  // The methods that can be chosen, and the draft lengths up to the method's; `most` is that of the server's own.
  offer(methods, most) {
    this.most = new Map([["", most], ...methods.map((each) => [each.name, each.num_speculative_tokens])]);
    offerOptions(this.method, [SERVERS, ...methods.map(({ name }) => [name, name])]);
    this.#offerLengths();
  }

  #offerLengths() {
    const most = this.most.get(this.method.value);
    const lengths = LENGTHS.filter((k) => k < most);
    if (most) lengths.push(most);
    offerOptions(this.k, [SERVERS, ["0", "0: speculation off"], ...lengths.map((k) => [String(k), String(k)])]);
  }

  choose({ method = "", k = "", rule = "" }) {
    this.method.value = method;
    this.#offerLengths();
    this.k.value = k;
    this.rule.value = rule;
  }

  // The fields of a request that this run chooses.
  get options() {
    const speculation = {};
    if (this.method.value) speculation.method = this.method.value;
    if (this.k.value) speculation.num_speculative_tokens = Number(this.k.value);
    if (this.rule.value) speculation.verification = this.rule.value;
    return Object.keys(speculation).length ? { speculation } : {};
  }

  clear() {
    this.tokens.clear();
    this.samples = [];
    this.text = "";
    this.isDone = false;
    this.firstMs = null;
    this.metrics = null;
    this.error.hidden = true;
    this.facts.replaceChildren();
  }

  // Show the events of `source`, [milliseconds, event] each; `changed` is called after every one.
  async play(source, changed) {
    this.clear();
    this.drafted = this.method.value;
    try {
      for await (const [ms, event] of source) {
        this.#add(ms, event);
        changed();
      }
      this.isDone = true;
    } catch (error) {
      if (error.name === "AbortError") return;
      this.error.textContent = error.message;
      this.error.hidden = false;
      throw error;
    } finally {
      this.#tell();
      changed();
    }
  }

  #add(ms, event) {
    this.metrics = event.metrics?.speculative_decoding ?? this.metrics;
    const choice = event.choices?.[0];
    if (!choice) return;
    const tokens = tokensOf(choice);
    if (tokens.length) this.firstMs ??= ms;
    const text = choice.text ?? choice.delta?.content ?? "";
    this.text += text;
    this.tokens.add(text, tokens);
    this.samples.push({ ms, tokens });
    this.#tell();
  }

  get numTokens() {
    return this.samples.reduce((sum, sample) => sum + sample.tokens.length, 0);
  }

  // Tokens after the first ones over the time after them; null without such.
  get rate() {
    const { samples } = this;
    const first = samples.findIndex((sample) => sample.tokens.length);
    if (first < 0 || samples.at(-1).ms <= samples[first].ms) return null;
    return (1000 * (this.numTokens - samples[first].tokens.length)) / (samples.at(-1).ms - samples[first].ms);
  }

  compareWith(first) {
    if (first === this || !first.isDone || !this.isDone) return;
    this.#fact("text", this.text === first.text ? `the same as ${first.name}` : `not that of ${first.name}`);
  }

  #tell() {
    this.facts.replaceChildren();
    if (this.firstMs === null) return;
    this.#fact("first token", `${this.firstMs.toFixed(0)} ms`);
    this.#fact("tokens", String(this.numTokens));
    if (this.rate !== null) this.#fact("tokens/s", this.rate.toFixed(0));
    const { metrics } = this;
    if (!metrics) return;
    if (this.drafted) this.#fact("method", this.drafted);
    if (metrics.num_spec_steps) {
      this.#fact("rounds", String(metrics.num_spec_steps));
      this.#fact("acceptance length", metrics.mean_acceptance_length.toFixed(2));
      this.#fact("acceptance rate", `${(100 * metrics.draft_acceptance_rate).toFixed(0)} %`);
      this.#fact("draft wait", `${(metrics.draft_wait_ns / 1e6).toFixed(1)} ms`);
    } else {
      this.#fact("no speculation", metrics.no_speculation_reason);
    }
  }

  #fact(name, value) {
    const [group, term, definition] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
    term.textContent = name;
    definition.textContent = value;
    group.append(term, definition);
    this.facts.append(group);
  }
}

// The options of a select, as [value, text]; what is chosen stays so if it can.
function offerOptions(select, options) {
  const now = [...select.options].map((option) => option.value);
  if (now.length === options.length && options.every(([value], i) => value === now[i])) return;
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  select.value = options.some(([value]) => value === chosen) ? chosen : "";
}
