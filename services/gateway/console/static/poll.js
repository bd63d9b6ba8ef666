// Asks for a document again and again, for pages that change slowly.

const EVERY_MS = 10_000;

/**
 * Until `close` is called; `again` asks at once.
 * took: called with each document. failed: with a sentence. ended: the session is over. every: milliseconds to the next question.
 */
export function poll(path, { took, failed, ended, every = () => EVERY_MS }) {
  let timer = 0;
  let closed = false;

  async function ask() {
    clearTimeout(timer);
    try {
      const answer = await fetch(path);
      const body = await answer.json();
      if (closed) return;
      if (answer.status === 401) return ended();
      if (answer.ok) took(body);
      else failed(body?.error?.message ?? `The answer was ${answer.status}.`);
    } catch {
      if (!closed) failed("The gateway does not answer.");
    }
    clearTimeout(timer);
    if (!closed) timer = setTimeout(ask, every());
  }

  ask();
  return {
    again: ask,
    close() {
      closed = true;
      clearTimeout(timer);
    },
  };
}
