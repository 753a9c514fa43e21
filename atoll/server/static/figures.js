// What the pool holds and spares, in figures: the legend, rates, why tokens were not reused; knows no canvas and no server.

import { KINDS } from "./pool.js";

const RATE_WINDOW_S = 3;
const LEGEND_ORDER = ["kv", "indexed", "image", "leased", "free", "null"];

const MISSES = {
  not_indexed: ["not computed before", "Never computed after this beginning, or not in a page that is full."],
  evicted: ["evicted", "Its page, or a checkpoint at or after it, was here and had to make room."],
  no_checkpoint: ["no checkpoint", "Its page is here, and no state at or after it ever was."],
  not_yet_copied: ["checkpoint on its way", "Its page is here; a running request is about to leave a state at or after it."],
  scored: ["prompt scored", "Log probabilities of the prompt were asked for, so nothing was looked up."],
  last_token: ["page of the last token", "Its page is here and holds the prompt's last token, which must be computed."],
};

export class Figures {
  constructor(find) {
    this.find = find;
    this.samples = [];
  }

  show(view) {
    const usableBytes = view.page_bytes * view.pages.length;
    this.text("pool-size", `${number(view.pages.length)} pages of ${view.page_size} tokens, ${bytes(usableBytes)}`);
    this.text("num-running", number(view.num_running));
    this.text("num-waiting", number(view.num_waiting));
    this.text("token-rate", this.rate(view).toFixed(0));
    this.text("hit-rate", view.num_queries ? percent(view.num_hits / view.num_queries) : "–");
    this.legend(view);
    this.misses(view);
    this.offload(view);
  }

  /** Tokens per second over the last few seconds, by the server's clock. */
  rate({ time_s, num_generated }) {
    this.samples.push([time_s, num_generated]);
    while (this.samples.length > 2 && this.samples[1][0] < time_s - RATE_WINDOW_S) this.samples.shift();
    const [[began_s, before]] = this.samples;
    return time_s > began_s ? Math.max(0, num_generated - before) / (time_s - began_s) : 0;
  }

  legend({ counts, image_pages, pages }) {
    const known = LEGEND_ORDER.filter((kind) => kind in counts && (kind !== "image" || image_pages));
    const kinds = [...known, ...Object.keys(counts).filter((kind) => !LEGEND_ORDER.includes(kind))];
    fill(this.find("legend"), kinds, (kind) => row(kind, { kind }, number(counts[kind]), KINDS[kind] ?? ""));
    const said = kinds.map((kind) => `${number(counts[kind])} ${kind}`).join(", ");
    this.find("cells").setAttribute("aria-label", `${number(pages.length)} pages: ${said}`);
  }

  misses({ num_queries, num_hits, misses }) {
    const shares = { reused: num_hits, ...misses };
    const bar = this.find("miss-bar");
    fill(bar, Object.keys(shares).filter((reason) => shares[reason]), (reason) => {
      const part = document.createElement("span");
      part.dataset.share = reason;
      part.style.flexGrow = shares[reason];
      return part;
    });
    bar.setAttribute("aria-label", `Of ${number(num_queries)} prompt tokens ${number(num_hits)} were reused`);
    fill(this.find("misses"), Object.keys(shares), (reason) => {
      const [label, title] = MISSES[reason] ?? [reason, "Taken from the prefix cache."];
      return row(label, { share: reason }, number(shares[reason]), title);
    });
  }

  /** Pages that have left the pool for tiers, and come back; hidden where there is no tier. */
  offload({ offload, num_parked, num_fetched }) {
    this.find("offload").hidden = this.find("parked").hidden = offload === null;
    if (offload === null) return;
    this.text("num-parked", number(num_parked));
    const moved = {
      fetched: ["tokens fetched", number(num_fetched), "Prompt tokens that were reused because a load brought them back."],
      loaded: ["loaded", flow(offload.loaded_bytes, offload.loaded_seconds), "From the tiers into the pool."],
      stored: ["stored", flow(offload.stored_bytes, offload.stored_seconds), "From the pool into the tiers."],
      failures: ["failures", number(offload.num_load_failures + offload.num_store_failures), "Loads and stores of which a part did not arrive."],
    };
    fill(this.find("moved"), Object.keys(moved), (name) => row(moved[name][0], { moved: name }, moved[name][1], moved[name][2]));
    fill(this.find("tiers"), offload.tiers, (tier) => {
      const item = row(tier.name, { tier: tier.name }, `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}${tier.is_suspect ? ", does not answer" : ""}`, "What is in use of this tier.");
      const meter = document.createElement("meter");
      meter.max = tier.capacity_bytes;
      meter.value = tier.used_bytes;
      item.insertBefore(meter, item.lastChild);
      return item;
    });
  }

  text(id, text) {
    const element = this.find(id);
    if (element.textContent !== text) element.textContent = text;
  }
}

function fill(element, keys, make) {
  element.replaceChildren(...keys.map(make));
}

function row(label, data, value, title) {
  const item = document.createElement("li");
  item.title = title;
  const swatch = document.createElement("span");
  swatch.className = "swatch";
  Object.assign(swatch.dataset, data);
  const count = document.createElement("b");
  count.textContent = value;
  item.append(swatch, label, count);
  return item;
}

function number(value) {
  return value.toLocaleString("en");
}

function percent(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

/** Bytes, and how many a second while any moved. */
function flow(movedBytes, seconds) {
  return seconds > 0 ? `${bytes(movedBytes)}, ${bytes(movedBytes / seconds)}/s` : bytes(movedBytes);
}

function bytes(value) {
  const unit = value < 1e6 ? ["kB", 1e3] : value < 1e9 ? ["MB", 1e6] : ["GB", 1e9];
  return `${(value / unit[1]).toFixed(1)} ${unit[0]}`;
}
