// Command ui opens a page in a headless browser and does with it what its arguments say, one after the other:
//
//	see=TEXT       waits until the page shows TEXT
//	gone=TEXT      waits until it does not
//	click=SELECTOR clicks on the element of a CSS selector
//	fill=TEXT      types into the element that has the focus, in place of what is there
//	hidden=TIME    hides the page, which must ask the server for nothing that long, and shows it, when it must ask again
//	shot=FILE      writes a picture of the page
//
// It fails if a step takes longer than 20 seconds, if a script fails or the browser refuses something, and if the
// page asks another server. It prints the text of the page in the end.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	cdplog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

const stepTimeout = time.Minute

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: ui URL [see=TEXT|gone=TEXT|click=SELECTOR|fill=TEXT|hidden=TIME|shot=FILE]...")
		os.Exit(2)
	}
	text, err := run(os.Args[1], os.Args[2:])
	fmt.Println(text)
	if err != nil {
		fmt.Fprintf(os.Stderr, "ui: %v\n", err)
		os.Exit(1)
	}
}

func run(page string, steps []string) (text string, err error) {
	address, err := url.Parse(page)
	if err != nil {
		return "", err
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath("/usr/bin/chromium-headless-shell"),
		chromedp.NoSandbox, // root has none
		chromedp.WindowSize(1200, 800))
	browser, stop := chromedp.NewExecAllocator(context.Background(), options...)
	defer stop()
	tab, closeTab := chromedp.NewContext(browser)
	defer closeTab()
	complaints, err := listen(tab, address.Host)
	if err != nil {
		return "", fmt.Errorf("browser: %w", err)
	}
	if err := chromedp.Do(tab, chromedp.Navigate(page)); err != nil {
		return "", fmt.Errorf("%s: %w", page, err)
	}
	for _, step := range steps {
		if err = do(tab, step); err != nil {
			err = fmt.Errorf("%s: %w", step, err)

			break
		}
	}
	text, textErr := chromedp.Run(tab, chromedp.Evaluate[string](pageText))

	return text, errors.Join(err, textErr, complaints())
}

// pageText is what the page shows, a line for each text.
const pageText = `[...document.querySelectorAll("h1, p, span, svg text")].map((e) => e.textContent).join("\n")`

func do(tab context.Context, step string) error {
	limited, cancel := context.WithTimeout(tab, stepTimeout)
	defer cancel()
	what, with, _ := strings.Cut(step, "=")
	switch what {
	case "see", "gone":
		for {
			text, err := chromedp.Run(limited, chromedp.Evaluate[string](pageText))
			if err != nil || strings.Contains(text, with) == (what == "see") {
				return err
			}
			time.Sleep(50 * time.Millisecond)
		}
	case "click":
		return chromedp.Do(limited, chromedp.Click(chromedp.CSS(with)))
	case "fill":
		if _, err := chromedp.Run(limited, chromedp.Evaluate[chromedp.Void]("document.activeElement.select()")); err != nil {
			return err
		}

		return chromedp.Do(limited, chromedp.KeyEvent(kb.Delete+with))
	case "hidden":
		return hide(limited, with)
	case "shot":
		picture, err := chromedp.Run(limited, chromedp.FullScreenshot(100))
		if err != nil {
			return err
		}

		return os.WriteFile(with, picture, 0o600)
	default:
		return fmt.Errorf("no such step")
	}
}

// hide hides the page from one of its questions to the server on, and shows it after some time.
func hide(tab context.Context, text string) error {
	long, err := time.ParseDuration(text)
	if err != nil {
		return err
	}
	asked := func() (int, error) {
		return chromedp.Run(tab, chromedp.Evaluate[int](`performance.getEntriesByType("resource").length`))
	}
	more := func(than int) (now int, err error) {
		for now, err = asked(); err == nil && now <= than; now, err = asked() {
			time.Sleep(50 * time.Millisecond)
		}

		return now, err
	}
	set := func(hidden bool) error {
		_, err := chromedp.Run(tab, chromedp.Evaluate[chromedp.Void](fmt.Sprintf(
			`Object.defineProperty(document, "hidden", {value: %t, configurable: true}); document.dispatchEvent(new Event("visibilitychange"))`, hidden)))

		return err
	}
	before, err := asked()
	if err == nil {
		before, err = more(before)
	}
	if err = errors.Join(err, set(true)); err != nil {
		return err
	}
	time.Sleep(long)
	now, err := asked()
	if err == nil && now != before {
		err = fmt.Errorf("the page has asked %d times", now-before)
	}
	if err = errors.Join(err, set(false)); err != nil {
		return err
	}
	_, err = more(now)

	return err
}

// listen returns a function that returns what was wrong so far: errors that the browser logs, scripts that fail,
// and requests to another server than host.
func listen(tab context.Context, host string) (func() error, error) {
	var mu sync.Mutex
	var wrong []error
	err := chromedp.Listen(tab, func(event any) {
		mu.Lock()
		defer mu.Unlock()
		switch e := event.(type) {
		case *cdplog.EventEntryAdded:
			if e.Entry.Level == cdplog.EntryLevelError && !strings.HasSuffix(e.Entry.URL, "/favicon.ico") {
				wrong = append(wrong, fmt.Errorf("the browser logs: %s %s", e.Entry.Text, e.Entry.URL))
			}
		case *runtime.EventExceptionThrown:
			wrong = append(wrong, fmt.Errorf("the script fails: %s", e.ExceptionDetails.Text))
		case *network.EventRequestWillBeSent:
			if asked, err := url.Parse(e.Request.URL); err != nil || asked.Host != host {
				wrong = append(wrong, fmt.Errorf("the page asks %s", e.Request.URL))
			}
		}
	})
	if err == nil {
		_, err = chromedp.Call(tab, network.Enable, network.EnableParams{})
	}

	return func() error {
		mu.Lock()
		defer mu.Unlock()

		return errors.Join(wrong...)
	}, err
}
