// One run: its options, its text and its figures.

import { TokenView, tokensOf } from "./tokens.js";

const SERVERS_CHOICE = ["", "server's choice"];
// Every length that a draft model or a head is asked for; lookups draft more, where a few lengths are enough.
const LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 24, 32, 48, 64];
// What the API calls `no_speculation_reason`.
const REASONS = {
  off: "it was switched off",
  engine: "the engine behind the gateway does not tell",
  no_draft: "the server has no draft",
  too_short: "the answer was too short",
  batch_size: "too many requests were running",
  pacing: "drafting would have been slower at this load",
  draft_not_ready: "no draft was ready in time",
  draft_failed: "the draft was lost, the target went on alone",
  draft_declined: "the draft does not support this request",
  no_proposal: "there was nothing to propose",
};

export class Run {
  constructor(template, number, { remove }) {
    this.element = template.content.firstElementChild.cloneNode(true);
    this.colour = number;
    this.name = `Run ${"ABCD"[number]}`;
    this.tokens = [];
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
    this.view = new TokenView(find(".output"), find(".token-details"));
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
    const options = [SERVERS_CHOICE, ["0", "0: no speculation"], ...lengths.map((k) => [String(k), String(k)])];
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
    this.view.clear();
    this.tokens = []; // as the API tells of them
    this.isDone = false;
    this.isSame = null; // as the first run's text; null: not compared
    this.metrics = null;
    this.error.hidden = true;
    this.facts.replaceChildren();
  }

  // Take the events of `source`; `changed` is called after every one, `show` makes them visible.
  async play(source, changed) {
    this.clear();
    this.playedMethod = this.method.value;
    try {
      for await (const event of source) {
        this.#add(event);
        changed();
      }
      this.isDone = true;
    } catch (error) {
      if (error.name === "AbortError") return;
      this.error.textContent = error.message;
      this.error.hidden = false;
      throw error;
    } finally {
      this.show();
      changed();
    }
  }

  #add(event) {
    this.metrics = event.metrics?.speculative_decoding ?? this.metrics;
    const choice = event.choices?.[0];
    if (!choice) return;
    const tokens = tokensOf(choice);
    this.view.add(choice.text ?? choice.delta?.content ?? "", tokens);
    this.tokens.push(...tokens);
  }

  get text() {
    return this.view.text;
  }

  // Tokens a second by the gateway's clock, for events arrive in bursts: those after the first verdict, over the time
  // after it; null without such.
  get rate() {
    const [first, last] = [this.tokens[0]?.time_ns, this.tokens.at(-1)?.time_ns];
    if (!(last > first)) return null;
    return (1e9 * this.tokens.filter((token) => token.time_ns > first).length) / (last - first);
  }

  compareWith(first) {
    if (first === this || !first.isDone || !this.isDone) return;
    this.isSame = this.text === first.text;
    this.comparison = this.isSame ? `the same as ${first.name}` : `not that of ${first.name}`;
    this.show();
  }

  show() {
    this.view.show();
    this.facts.replaceChildren();
    if (!this.tokens.length) return;
    if (this.rate !== null) this.#fact("tokens/s", this.rate.toFixed(0));
    this.#fact("tokens", String(this.tokens.length));
    this.#fact("first token", `${(this.tokens[0].time_ns / 1e6).toFixed(0)} ms`);
    if (this.isSame !== null) this.#fact("text", this.comparison);
    const { metrics } = this;
    if (!metrics) return;
    if (metrics.num_spec_steps) {
      if (this.playedMethod) this.#fact("method", this.playedMethod);
      this.#fact("rounds", String(metrics.num_spec_steps));
      this.#fact("acceptance length", metrics.mean_acceptance_length.toFixed(2));
      this.#fact("acceptance rate", `${(100 * metrics.draft_acceptance_rate).toFixed(0)} %`);
      this.#fact("draft wait", `${(metrics.draft_wait_ns / 1e6).toFixed(1)} ms`);
      if (metrics.num_draft_failures) this.#fact("draft lost", metrics.num_draft_failures === 1 ? "once" : `${metrics.num_draft_failures} times`);
    } else {
      this.#fact("no speculation", REASONS[metrics.no_speculation_reason] ?? metrics.no_speculation_reason);
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
