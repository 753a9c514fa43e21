// The conversation: sends it whole, shows the answer as it comes, stops it, forgets it; knows no pool.

import { ask, events } from "./server.js";

const EXAMPLES = [
  "Ivan buys 3 notebooks at $4 each and 2 pens at $2 each. He pays with $20. How much change does he get?",
  "A chess club has 12 members who pay $15 a month. How many dollars does the club get in 4 months?",
];
const NEAR_END_PX = 40;

export class Chat {
  constructor(find) {
    this.turns = find("turns");
    this.prompt = find("prompt");
    this.send = find("send");
    this.stop = find("stop");
    this.clear = find("clear");
    this.temperature = find("temperature");
    this.maxTokens = find("max-tokens");
    this.messages = [];
    this.running = null; // AbortController of the answer that is coming

    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.answer(this.prompt.value.trim());
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.answer(this.prompt.value.trim());
      }
    });
    this.stop.addEventListener("click", () => this.running?.abort());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.running?.abort();
    });
    this.clear.addEventListener("click", () => this.forget());
    this.showExamples();
  }

  /** Forget the conversation; an answer that is coming is stopped. */
  forget() {
    this.running?.abort();
    this.messages = [];
    this.turns.replaceChildren();
    this.clear.disabled = true;
    this.showExamples();
    this.prompt.focus();
  }

  async answer(text) {
    if (!text || this.running) return;
    const running = (this.running = new AbortController());
    const messages = this.messages;
    this.turns.querySelector("#examples")?.remove();
    this.prompt.value = "";
    messages.push({ role: "user", content: text });
    addTurn(this.turns, "user").textContent = text;
    const words = addTurn(this.turns, "assistant");
    const turn = words.parentElement;
    this.showRunning(turn, true);
    const came = { text: "", usage: null };
    const beganMs = performance.now();
    try {
      await this.read(messages, running.signal, came, (piece) => this.append(words, piece));
      addNote(turn, summary(came.usage, (performance.now() - beganMs) / 1000));
    } catch (error) {
      if (error.name === "AbortError") addNote(turn, "Stopped.");
      else addNote(turn, sentence(error.message), "fault");
    }
    // What was not answered is not asked again with the next question.
    if (came.text) messages.push({ role: "assistant", content: came.text });
    else messages.pop();
    this.running = null;
    this.showRunning(turn, false);
    this.turns.scrollTop = this.turns.scrollHeight;
  }

  async read(messages, signal, came, show) {
    const body = { messages, stream: true, stream_options: { include_usage: true } };
    if (this.temperature.value) body.temperature = Number(this.temperature.value);
    if (this.maxTokens.value) body.max_tokens = Number(this.maxTokens.value);
    const response = await ask("/v1/chat/completions", { body, signal });
    for await (const event of events(response)) {
      const piece = event.choices[0]?.delta.content ?? "";
      came.text += piece;
      came.usage = event.usage ?? came.usage;
      if (piece) show(piece);
    }
  }

  append(words, piece) {
    const { scrollTop, scrollHeight, clientHeight } = this.turns;
    const follows = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    words.append(piece);
    if (follows) this.turns.scrollTop = this.turns.scrollHeight;
  }

  showRunning(turn, runs) {
    turn.classList.toggle("live", runs);
    // A reader of the screen hears an answer once it is whole.
    this.turns.setAttribute("aria-busy", String(runs));
    this.stop.hidden = !runs;
    this.send.hidden = runs;
    this.clear.disabled = !this.turns.children.length;
    if (runs) this.turns.scrollTop = this.turns.scrollHeight;
  }

  showExamples() {
    const examples = document.createElement("div");
    examples.id = "examples";
    const invitation = document.createElement("p");
    invitation.textContent = "Ask the model something, or try one of these:";
    examples.append(invitation);
    for (const text of EXAMPLES) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.addEventListener("click", () => this.answer(text));
      examples.append(button);
    }
    this.turns.append(examples);
  }
}

function addTurn(turns, role) {
  const turn = document.createElement("article");
  turn.className = `turn ${role}`;
  turn.setAttribute("aria-label", role === "user" ? "You" : "Model");
  const words = document.createElement("p");
  turn.append(words);
  turns.append(turn);
  return words;
}

function addNote(turn, text, kind = "") {
  const note = document.createElement("div");
  note.className = `note ${kind}`;
  note.textContent = text;
  turn.append(note);
}

function summary(usage, seconds) {
  if (!usage) return "";
  const reused = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const rate = usage.completion_tokens / seconds;
  return `${usage.completion_tokens} tokens, ${rate.toFixed(0)} per second; ${reused} of the prompt's ${usage.prompt_tokens} reused`;
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (text.endsWith(".") ? "" : ".");
}
