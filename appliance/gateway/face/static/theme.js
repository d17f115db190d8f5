// Sets the colours before the first paint. A classic script, because modules run later.
{
  const kept = localStorage.getItem("theme");
  const isDark = kept ? kept === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
}
