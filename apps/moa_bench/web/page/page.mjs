// Has a worker take the steps that the program asks for, as the runtime does: a page's own thread has other things to do.
const say = (said) => fetch("/said", { method: "POST", body: JSON.stringify(said) });

const worker = new Worker("/steps.mjs", { type: "module" });
worker.onmessage = ({ data }) => say(data);
worker.onerror = ({ message }) => say({ error: message || "the worker cannot be started, or there is too little memory" });
for (;;) {
  const todo = await (await fetch("/next")).json();
  if (todo.stop) break;
  worker.postMessage(todo);
}
