/** The service worker, and newer versions of the page. */

const LOOK_MS = 3_600_000;

/**
 * Have the page start without a network, and hear of newer versions of it.
 *
 * @param found a newer version is there; what it is given makes the page that one.
 */
export async function watchUpdates(found: (takeOver: () => void) => void): Promise<void> {
  if (!("serviceWorker" in navigator)) return; // no secure context
  const hadOne = navigator.serviceWorker.controller !== null;
  let registration: ServiceWorkerRegistration;
  try {
    registration = await navigator.serviceWorker.register("sw.js", { updateViaCache: "none" });
  } catch {
    return; // as where the user passed over a certificate: the page works, and needs a network to start
  }
  const tell = (worker: ServiceWorker | null): void => {
    if (worker !== null && hadOne) found(() => takeOver(worker));
  };
  tell(registration.waiting);
  registration.addEventListener("updatefound", () => {
    const worker = registration.installing;
    worker?.addEventListener("statechange", () => {
      if (worker.state === "installed") tell(worker);
    });
  });
  setInterval(() => void registration.update().catch(() => undefined), LOOK_MS); // it fails without a network
}

function takeOver(worker: ServiceWorker): void {
  navigator.serviceWorker.addEventListener("controllerchange", () => location.reload(), { once: true });
  worker.postMessage("take over");
}
