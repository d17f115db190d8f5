// One answer of the model: asked for as a stream, and shown as Markdown.

import { marked } from "./marked.esm.js";
import { t } from "./strings.js";

// What an answer may become in the page: text and its structure. Nothing that loads, runs or looks like the page's own.
const ALLOWED = {
  ALLOWED_TAGS: ["p", "br", "hr", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li", "a",
    "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td", "sup", "sub"],
  ALLOWED_ATTR: ["href", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
};

const escaped = (text) => text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);

// HTML in an answer is shown as the text that it is, and a picture as its description: nothing is fetched for it.
marked.use({
  gfm: true,
  breaks: true,
  renderer: { html: ({ text }) => escaped(text), image: ({ text, href }) => escaped(`${text} (${href})`) },
});

/** Returns a piece of a page made from Markdown that nobody trusts. */
export function fromMarkdown(text) {
  const made = DOMPurify.sanitize(marked.parse(text), { ...ALLOWED, RETURN_DOM_FRAGMENT: true });
  for (const block of made.querySelectorAll("pre")) block.tabIndex = 0; // a long line scrolls, also by keys
  for (const link of made.querySelectorAll("a")) {
    link.rel = "noopener noreferrer nofollow";
    link.target = "_blank";
  }
  return made;
}

/** Yields the data of each event of a stream. Calls `onComment` with the words of each comment, which tell of a wait. */
async function* eventsOf(body, onComment) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split(/\r?\n/);
    held = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ")) yield line.slice(6);
      else if (line.startsWith(":") && line.length > 2) onComment(line.slice(1).trim());
    }
  }
}

/** Returns `calls` with the parts of a piece of a stream added. */
function withParts(calls, parts) {
  const all = [...calls];
  for (const part of parts) {
    const before = all[part.index] ?? { name: "", arguments: "" };
    all[part.index] = {
      name: before.name + (part.function?.name ?? ""),
      arguments: before.arguments + (part.function?.arguments ?? ""),
    };
  }
  return all;
}

/**
 * Asks for an answer and calls `onAnswer(answer)` as it grows: {text, reasoning, calls, usage, seconds, speed, problem,
 * waiting}. `waiting` says what it waits for before it begins; null otherwise.
 * Ends early, with what has come, when `signal` is aborted.
 */
export async function ask(request, signal, onAnswer) {
  let answer = { text: "", reasoning: "", calls: [], usage: null, seconds: null, speed: null, problem: null, waiting: null };
  const began = performance.now();
  let first = null;
  let timings = null;
  let isWhole = false;
  const tell = (more) => {
    answer = { ...answer, ...more };
    onAnswer(answer);
    return answer;
  };
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    if (!response.ok) {
      const body = await response.json().catch(() => null);
      return tell({ problem: body?.error?.message ?? `${response.status} ${response.statusText}`, status: response.status });
    }
    for await (const data of eventsOf(response.body, (waiting) => tell({ waiting }))) {
      if (data === "[DONE]") {
        isWhole = true;
        break;
      }
      const event = JSON.parse(data);
      if (event.error) tell({ problem: event.error.message });
      timings = event.timings ?? timings;
      const delta = event.choices?.[0]?.delta ?? {};
      const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
      if (first === null && (delta.content || reasoning || delta.tool_calls)) first = performance.now();
      tell({
        text: answer.text + (delta.content ?? ""),
        reasoning: answer.reasoning + reasoning,
        calls: delta.tool_calls ? withParts(answer.calls, delta.tool_calls) : answer.calls,
        usage: event.usage ?? answer.usage,
        waiting: null,
      });
    }
    if (!isWhole && !answer.problem) tell({ problem: t("cutOff") });
  } catch (error) {
    if (error.name !== "AbortError") tell({ problem: String(error.message ?? error) });
  }
  const now = performance.now();
  const tokens = timings?.predicted_n ?? answer.usage?.completion_tokens ?? null;
  const clocked = first !== null && tokens > 1 ? (1000 * (tokens - 1)) / (now - first) : null;
  return tell({ waiting: null, seconds: (now - began) / 1000, tokens, speed: timings?.predicted_per_second ?? clocked });
}
