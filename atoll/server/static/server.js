// Asks the server, with the key if it wants one; knows nothing of what is asked.

const STORED_KEY = "atoll-api-key";
let keyDialog = null; // the promise of a key, while somebody is asked for one

/** The answer to a request that went well. Throws an Error with the server's own words, or AbortError. */
export async function ask(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(STORED_KEY);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const options = { headers, signal, cache: "no-store" };
    if (body !== undefined) {
      options.method = "POST";
      options.body = JSON.stringify(body);
      headers["Content-Type"] = "application/json";
    }
    const response = await fetch(path, options);
    if (response.ok) return response;
    if (response.status !== 401) throw new Error(await fault(response));
    // Another question may have brought the key meanwhile.
    if (sessionStorage.getItem(STORED_KEY) === key) await (keyDialog ??= askForKey(key !== null));
  }
}

/** The values of a stream of server-sent events, up to [DONE]. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server ended the stream before its end");
    text += value;
    const lines = text.split("\n");
    text = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function fault(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function askForKey(wasWrong) {
  const dialog = document.getElementById("key-dialog");
  const form = document.getElementById("key-form");
  const input = document.getElementById("key");
  document.getElementById("key-fault").textContent = wasWrong ? "That key is wrong; try another." : "It is kept for this tab only.";
  input.value = "";
  dialog.oncancel = (event) => event.preventDefault();
  dialog.showModal();
  return new Promise((resolve) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(STORED_KEY, input.value);
      dialog.close();
      keyDialog = null;
      resolve();
    };
  });
}
