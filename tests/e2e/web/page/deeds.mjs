/** What a page does for its test. */

/** Ask the test what to do, do it, and say what came of it, until the test has no more. */
export async function follow(deeds) {
  for (;;) {
    const todo = await (await fetch("/next")).json();
    if (todo.stop) return;
    if (todo.reload) {
      location.reload();
      return;
    }
    let said;
    try {
      said = (await deeds[todo.do](todo)) ?? {};
    } catch (error) {
      said = { failed: `${error.name}: ${error.message}` };
    }
    await fetch("/said", { method: "POST", body: JSON.stringify(said) });
  }
}
