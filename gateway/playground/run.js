// One run: its options, its text and its figures.

import { TokenView, tokensOf } from "./tokens.js";

const SERVERS_CHOICE = ["", "the server's choice"];
// Every length that a draft model or a head is asked for; lookups draft more, where a few lengths are enough.
const LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 24, 32, 48, 64];

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
    this.element.setAttribute("aria-label", this.name);
    find("h2").textContent = this.name;
    find(".output").setAttribute("aria-label", `Text of ${this.name}; arrow keys move from token to token`);
    this.method = find("[name=method]");
    this.method.addEventListener("change", () => this.#offerLengths({ keep: false }));
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
    offerOptions(this.method, [SERVERS_CHOICE, ...methods.map(({ name }) => [name, name])]);
    this.#offerLengths();
  }

  #offerLengths({ keep = true } = {}) {
    const most = this.most.get(this.method.value) ?? 0;
    const lengths = LENGTHS.filter((k) => k < most);
    if (most) lengths.push(most);
    const options = [SERVERS_CHOICE, ["0", "0: speculation off"], ...lengths.map((k) => [String(k), String(k)])];
    offerOptions(this.k, options, { keep });
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
    this.playedMethod = this.method.value;
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
    if (metrics.num_spec_steps) {
      if (this.playedMethod) this.#fact("method", this.playedMethod);
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

// The options of a select, as [value, text]. What is chosen stays, also if it is no longer offered: the server's answer
// says why. Without `keep` it becomes the server's choice then.
function offerOptions(select, offered, { keep = true } = {}) {
  const chosen = select.value;
  const isOffered = offered.some(([value]) => value === chosen);
  const options = keep && chosen && !isOffered ? [...offered, [chosen, `${chosen} (not offered)`]] : offered;
  const now = [...select.options];
  const isSame = ([value, text], i) => value === now[i].value && text === now[i].textContent;
  if (now.length === options.length && options.every(isSame)) return;
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  select.value = keep || isOffered ? chosen : "";
}
