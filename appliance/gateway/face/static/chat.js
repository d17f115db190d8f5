// The chat page. Everything of a chat stays in this browser; only the messages go to the model.

import { h, render } from "./preact.module.js";
import { useEffect, useRef, useState } from "./hooks.module.js";
import { ask, fromMarkdown } from "./answer.js";
import { fresh, keep, keepSettings, kept, requestFor, settings, TITLE } from "./chats.js";
import { clean, count, seconds, speed } from "./format.js";
import { html, Login } from "./session.js";
import { language, switchLanguage, t } from "./strings.js";

const IMAGE_BYTES_MAX = 8 * 2 ** 20;
const SERVES = new Set(["ready", "held"]);
const COMES = new Set(["starting", "loading", "tuning", "restarting"]);

function Markdown({ text }) {
  const place = useRef(null);
  const latest = useRef(text);
  const timer = useRef(0);
  const show = () => {
    timer.current = 0;
    place.current?.replaceChildren(fromMarkdown(clean(latest.current)));
  };
  useEffect(() => {
    latest.current = text;
    // At most ten times a second: a fast model sends more pieces than anybody reads.
    timer.current ||= setTimeout(show, place.current.firstChild ? 100 : 0);
  }, [text]);
  useEffect(() => () => clearTimeout(timer.current), []);
  return html`<div class="markdown" ref=${place}></div>`;
}

function Answer({ message, isLast, isBusy, onAgain }) {
  const { text, reasoning, calls, problem, tokens, usage, waiting } = message;
  return html`<article class="answer">
    <h2 class="hidden">${t("answer")}</h2>
    ${reasoning && html`<details><summary>${t("reasoning")}</summary><${Markdown} text=${reasoning} /></details>`}
    <${Markdown} text=${text ?? ""} />
    ${(calls ?? []).map(
      (call) => html`<details open><summary>${t("call")} <code>${clean(call.name)}</code></summary>
        <pre tabindex="0"><code>${clean(call.arguments)}</code></pre></details>`,
    )}
    ${waiting && html`<p class="muted waiting" role="status">${clean(waiting)}</p>`}
    ${problem && html`<p class="problem error" role="alert">${clean(problem)}</p>`}
    <footer>
      ${message.seconds != null &&
      html`<small>${tokens == null ? seconds(message.seconds) : t("figures", count(tokens), speed(message.speed), seconds(message.seconds))}${
        usage?.prompt_tokens_details?.cached_tokens ? ` · ${t("fromCache", count(usage.prompt_tokens_details.cached_tokens))}` : ""
      }</small>`}
      ${text && navigator.clipboard && html`<button type="button" class="plain" onClick=${() => navigator.clipboard.writeText(text)}>${t("copy")}</button>`}
      ${isLast && !isBusy && html`<button type="button" class="plain" onClick=${onAgain}>${t("again")}</button>`}
    </footer>
  </article>`;
}

function Question({ message, onEdit, isBusy }) {
  const [draft, setDraft] = useState(null);
  const save = (event) => {
    event.preventDefault();
    setDraft(null);
    onEdit(draft);
  };
  return html`<article class="question">
    <h2 class="hidden">${t("question")}</h2>
    ${(message.images ?? []).map((url) => html`<img src=${url} alt=${t("image")} />`)}
    ${draft === null
      ? html`<p>${clean(message.text)}</p>
          ${!isBusy && html`<footer><button type="button" class="plain" onClick=${() => setDraft(message.text)}>${t("edit")}</button></footer>`}`
      : html`<form onSubmit=${save}>
          <textarea aria-label=${t("edit")} value=${draft} rows="4" onInput=${(event) => setDraft(event.target.value)}></textarea>
          <button type="submit">${t("send")}</button>
        </form>`}
  </article>`;
}

function Composer({ isBusy, canSee, onSend, onStop }) {
  const [text, setText] = useState("");
  const [images, setImages] = useState([]);
  const send = (event) => {
    event?.preventDefault();
    if (isBusy || !text.trim()) return;
    onSend(text, images);
    setText("");
    setImages([]);
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  const add = async (event) => {
    const files = [...event.target.files].filter((file) => file.size <= IMAGE_BYTES_MAX);
    event.target.value = "";
    const read = (file) =>
      new Promise((done) => {
        const reader = new FileReader();
        reader.onload = () => done(reader.result);
        reader.readAsDataURL(file);
      });
    setImages([...images, ...(await Promise.all(files.map(read)))]);
  };
  return html`<form class="composer" onSubmit=${send}>
    ${images.map((url) => html`<img src=${url} alt=${t("image")} />`)}
    <textarea aria-label=${t("message")} placeholder=${t("message")} rows="3" value=${text}
      onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey}></textarea>
    <div>
      ${canSee && html`<label>${t("addImage")} <input type="file" accept="image/*" multiple onChange=${add} /></label>`}
      ${isBusy ? html`<button type="button" onClick=${onStop}>${t("stop")}</button>` : html`<button type="submit">${t("send")}</button>`}
    </div>
  </form>`;
}

function Settings({ found, onChange }) {
  const set = (name) => (event) => onChange({ ...found, [name]: event.target.value });
  return html`<details class="settings"><summary>${t("settings")}</summary>
    <label>${t("system")} <textarea rows="3" value=${found.system} onInput=${set("system")}></textarea></label>
    ${[["temperature", "0.1"], ["top_p", "0.05"], ["max_tokens", "1"]].map(
      ([name, step]) => html`<label>${name} <input type="number" min="0" step=${step} placeholder=${t("ofModel")}
          value=${found[name]} onInput=${set(name)} /></label>`,
    )}
  </details>`;
}

function Sidebar({ chats, current, onOpen, onNew, onDelete, children }) {
  return html`<aside>
    <button type="button" onClick=${onNew}>${t("newChat")}</button>
    <ul>
      ${chats.map(
        (chat) => html`<li key=${chat.id}>
          <button type="button" class="plain title" aria-current=${chat.id === current ? "true" : undefined} onClick=${() => onOpen(chat.id)}>
            ${clean(chat.title || t("newChat"))}</button>
          <button type="button" class="plain" aria-label=${`${t("remove")}: ${clean(chat.title)}`} onClick=${() => onDelete(chat.id)}>×</button>
        </li>`,
      )}
    </ul>
    ${children}
  </aside>`;
}

/** Returns the models that give text, and what is wrong if there is no answer. */
async function listed() {
  const answer = await fetch("/v1/models").catch(() => null);
  if (!answer?.ok) return { code: answer?.status ?? 0, models: [] };
  const { data } = await answer.json();
  return { code: 200, models: data.filter((one) => (one.architecture?.output_modalities ?? ["text"]).includes("text")) };
}

/** Returns the seconds that loading takes, by the model's id; empty if there is one model or no answer. */
async function loadTimes(models) {
  if (models.length < 2) return {};
  const answer = await fetch("/appliance/v1/fleet").catch(() => null);
  const fleet = answer?.ok ? await answer.json() : { models: [] };
  return Object.fromEntries(fleet.models.map((row) => [row.model, row.reload_s]));
}

/** What is to be known before the first message to a model that does not serve. */
function Readiness({ model, isOne, loadS }) {
  if (SERVES.has(model?.state)) return null;
  const waits = model?.state === "asleep" || (!isOne && COMES.has(model?.state));
  if (!waits) return html`<p class="banner" role="status">${t("notReady", clean(model?.state ?? "–"))}</p>`;
  return html`<p class="muted hint" role="status">${loadS == null ? t("loadsFirst") : t("loadsIn", seconds(loadS))}</p>`;
}

function App() {
  const [chats, setChats] = useState(() => [fresh(), ...kept()]);
  const [current, setCurrent] = useState(chats[0].id);
  const [models, setModels] = useState(null);
  const [model, setModel] = useState("");
  const [loadS, setLoadS] = useState({});
  const [found, setFound] = useState(settings);
  const [needsLogin, setNeedsLogin] = useState(false);
  const [stop, setStop] = useState(null);
  const end = useRef(null);
  const timer = useRef(0);
  const chat = chats.find((one) => one.id === current);
  const chosen = models?.find((one) => one.id === model);

  const look = async () => {
    const { code, models: all } = await listed();
    setNeedsLogin(code === 401);
    setModels(all);
    setModel((before) => (all.some((one) => one.id === before) ? before : (all[0]?.id ?? "")));
    clearTimeout(timer.current);
    if (code !== 401 && !all.some((one) => SERVES.has(one.state))) timer.current = setTimeout(look, 2000);
    setLoadS(await loadTimes(all));
  };
  useEffect(() => void look(), []);
  useEffect(() => end.current?.scrollIntoView({ block: "end" }), [current, chat?.messages.length]);
  if (needsLogin) return html`<${Login} onDone=${look} />`;

  const put = (id, messages) =>
    setChats((all) => {
      const title = messages.find((one) => one.role === "user")?.text.slice(0, TITLE) ?? "";
      return all.map((one) => (one.id === id ? { ...one, title, messages } : one));
    });

  const answer = async (messages) => {
    const id = current;
    const stopper = new AbortController();
    setStop(stopper);
    const grown = (one) => put(id, [...messages, { role: "assistant", model, ...one }]);
    grown({ text: "" });
    const result = await ask(requestFor(model, messages, found), stopper.signal, grown);
    setStop(null);
    if (result.status === 401) setNeedsLogin(true);
    setChats((all) => (keep(all), all));
    if (models?.length > 1) look(); // it may have been loaded, and another one unloaded for it
  };

  const remove = (id) => {
    const left = chats.filter((one) => one.id !== id);
    const all = left.length ? left : [fresh()];
    keep(all);
    setChats(all);
    if (id === current) setCurrent(all[0].id);
  };
  const begin = () => {
    const made = fresh();
    setChats([made, ...chats.filter((one) => one.messages.length)]);
    setCurrent(made.id);
  };
  const isBusy = stop !== null;
  const messages = chat.messages;
  return html`
    <header>
      <h1>${t("chat")} <span class="model">${models?.length > 1
        ? html`<select aria-label=${t("model")} value=${model} onChange=${(event) => setModel(event.target.value)}>
            ${models.map((one) => html`<option value=${one.id}>${clean(one.id)}</option>`)}</select>`
        : clean(model)}</span></h1>
      <nav aria-label=${t("title")}>
        <a href="/">${t("dashboard")}</a>
        <button type="button" class="plain" onClick=${switchLanguage} lang=${language === "zh" ? "en" : "zh-CN"}>${t("language")}</button>
      </nav>
    </header>
    <div class="chat">
      <${Sidebar} chats=${chats} current=${current} onOpen=${setCurrent} onNew=${begin} onDelete=${remove}>
        <${Settings} found=${found} onChange=${(next) => (keepSettings(next), setFound(next))} />
      </${Sidebar}>
      <main>
        ${models && html`<${Readiness} model=${chosen} isOne=${models.length < 2} loadS=${loadS[model]} />`}
        <div class="messages" role="log" aria-label=${t("chat")} aria-busy=${isBusy}>
          ${messages.length === 0 && html`<p class="muted">${t("kept")}</p>`}
          ${messages.map((message, at) =>
            message.role === "user"
              ? html`<${Question} key=${at} message=${message} isBusy=${isBusy}
                  onEdit=${(text) => answer([...messages.slice(0, at), { ...message, text }])} />`
              : html`<${Answer} key=${at} message=${message} isLast=${at === messages.length - 1} isBusy=${isBusy}
                  onAgain=${() => answer(messages.slice(0, at))} />`,
          )}
          <div ref=${end}></div>
        </div>
        <${Composer} isBusy=${isBusy} canSee=${(chosen?.architecture?.input_modalities ?? []).includes("image")}
          onStop=${() => stop?.abort()} onSend=${(text, images) => answer([...messages, { role: "user", text, images }])} />
      </main>
    </div>`;
}

document.title = t("chat");
render(h(App), document.getElementById("app"));
