// The badges of the gateway, its targets and its drafts.

import { get } from "./api.js";

const INTERVAL_MS = 1000;

export class Services {
  // `changed` gets every answer; `failed` gets the error of a call without one.
  constructor(list, announcer, { changed, failed }) {
    this.list = list;
    this.announcer = announcer;
    this.changed = changed;
    this.failed = failed;
    this.before = new Map();
  }

  async watch() {
    for (;;) {
      if (!document.hidden) await this.ask();
      await new Promise((resolve) => setTimeout(resolve, INTERVAL_MS));
    }
  }

  async ask() {
    try {
      this.show(await get("services"));
    } catch (error) {
      const text = error.status === 401 ? "the gateway asks for an API key" : `the gateway does not answer: ${error.message}`;
      this.#badges([{ name: "gateway", status: "down", text }]);
      this.failed(error);
    }
  }

  show(services) {
    const sequences = `${services.num_running} running, ${services.num_waiting} waiting`;
    const badges = [{ name: "gateway", status: "up", text: `gateway: ${sequences}` }];
    for (const target of services.targets) {
      badges.push(badgeOf("target", target, `sessions ${target.num_sessions}, KV ${percent(target.kv_use)}`));
    }
    for (const draft of services.drafts) {
      badges.push(badgeOf("draft", draft, `${draft.method}, sessions ${draft.num_sessions}, busy ${percent(draft.busy_share)}`));
    }
    if (services.lookups.length) badges.push({ name: "lookup", status: "up", text: `lookups: ${services.lookups.join(", ")}` });
    this.#badges(badges);
    this.changed(services);
  }

  #badges(badges) {
    const items = badges.map(({ name, status, text }) => {
      const item = document.createElement("li");
      item.className = "badge";
      item.dataset.status = status;
      item.textContent = text;
      if (this.before.size && this.before.get(name) !== status) this.announcer.textContent = text;
      return item;
    });
    this.before = new Map(badges.map(({ name, status }) => [name, status]));
    this.list.replaceChildren(...items);
  }
}

function badgeOf(role, replica, load) {
  const text = replica.status === "up" ? load : replica.reason || "down";
  return { name: `${role} ${replica.name}`, status: replica.status, text: `${role} ${replica.name}: ${text}` };
}

function percent(share) {
  return `${(100 * share).toFixed(0)} %`;
}
