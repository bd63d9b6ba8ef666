// Asks for a document again and again, for pages that change slowly.

const EVERY_MS = 10_000;

/** Until `close` is called. took: called with each document. failed: with a sentence. ended: the session is over. */
export function poll(path, { took, failed, ended }) {
  let timer = 0;
  let closed = false;

  async function ask() {
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
    if (!closed) timer = setTimeout(ask, EVERY_MS);
  }

  ask();
  return {
    close() {
      closed = true;
      clearTimeout(timer);
    },
  };
}
