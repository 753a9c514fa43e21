// Joins the page's parts, and asks for the pool again and again: often while something runs, seldom otherwise, never while hidden.

import { Chat } from "./chat.js";
import { Figures } from "./figures.js";
import { PoolCanvas } from "./pool.js";
import { ask } from "./server.js";

const BUSY_MS = 200;
const IDLE_MS = 1000;
const FAULT_MS = 2000;

const find = (id) => document.getElementById(id);
const figures = new Figures(find);
const canvas = new PoolCanvas(find("cells"), find("cell-name"));
const chat = new Chat(find);

function showStatus(state, text) {
  const status = find("status");
  if (status.textContent === text) return;
  status.dataset.state = state;
  status.textContent = text;
}

async function look() {
  const view = await (await ask("/pool")).json();
  canvas.show(view.pages, view.kinds);
  figures.show(view);
  showStatus("ready", "ready");
  return view.num_running || view.num_waiting || view.num_parked || chat.running ? BUSY_MS : IDLE_MS;
}

async function watch() {
  for (;;) {
    let waitMs = IDLE_MS;
    if (!document.hidden) {
      try {
        waitMs = await look();
      } catch (error) {
        showStatus("fault", error instanceof TypeError ? "the server cannot be reached" : error.message);
        waitMs = FAULT_MS;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, waitMs));
  }
}

async function nameModel() {
  const { data } = await (await ask("/v1/models")).json();
  find("model").textContent = data[0].id;
  document.title = `Atoll: ${data[0].id}`;
}

watch();
nameModel().catch((error) => console.error(error));
