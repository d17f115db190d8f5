// What this browser keeps for the pages. A browser may refuse it, and other programs of this address may change it.

/** Returns the kept text; null if there is none. */
export function read(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // the browser keeps nothing for this address
  }
}

/** Keeps the text. Returns false if there is no room, or if the browser keeps nothing. */
export function write(name, text) {
  try {
    localStorage.setItem(name, text);
    return true;
  } catch {
    return false;
  }
}
