// Sets the colours before the first paint. A classic script, because modules run later.
{
  let kept = null;
  try {
    kept = localStorage.getItem("theme");
  } catch {
    // the browser keeps nothing for this address
  }
  const isDark = kept ? kept === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
}
