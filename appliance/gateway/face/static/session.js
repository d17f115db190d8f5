// The login, and requests of the page. The cookie is kept by the browser, out of reach of scripts.

import { h } from "./preact.module.js";
import { useState } from "./hooks.module.js";
import htm from "./htm.module.js";
import { t } from "./strings.js";

export const html = htm.bind(h);

/** Sends JSON. Returns {status, body}; status 0 if there was no answer. */
export async function post(path, body) {
  try {
    const answer = await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
    });
    return { status: answer.status, body: await answer.json().catch(() => null) };
  } catch {
    return { status: 0, body: null };
  }
}

/** Returns the status of a GET without its body; 0 if there was no answer. */
export async function statusOf(path) {
  try {
    return (await fetch(path, { method: "HEAD" })).status;
  } catch {
    return 0;
  }
}

export function Login({ onDone }) {
  const [problem, setProblem] = useState("");
  const submit = async (event) => {
    event.preventDefault();
    const { status } = await post("/login", { key: event.target.elements.key.value });
    if (status === 204) onDone();
    else setProblem(t(status === 401 ? "wrongKey" : "noAnswer"));
  };
  return html`<main class="login">
    <h1>${t("login")}</h1>
    <form onSubmit=${submit}>
      <p id="login-words">${t("loginWords")}${" "}<code>docker exec NAME appliance key</code></p>
      <input type="text" autocomplete="username" value="appliance" hidden />
      <label for="key">${t("key")}</label>
      <input id="key" name="key" type="password" autocomplete="current-password" required autofocus
        aria-describedby="login-words" aria-invalid=${problem ? "true" : undefined} />
      <p role="alert">${problem}</p>
      <button type="submit">${t("login")}</button>
    </form>
  </main>`;
}
