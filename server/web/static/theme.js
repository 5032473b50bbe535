// Runs before the page is painted, so that the page does not flash in the colours of the other theme.
{
  let theme = null;
  try {
    theme = localStorage.getItem("orca-theme");
  } catch {
    // No storage: the system's theme.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
