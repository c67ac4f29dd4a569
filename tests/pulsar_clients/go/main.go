// Runs scenarios with Pulsar's Go client, and prints a line of JSON for each, as runner.py does.
//
// A scenario is a method of Scenarios that takes a Program and returns what it saw. Arguments: the URL of the service, that
// of its administration, what tells this run from others, and names of scenarios (none: all).
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	atOnce = 8 // scenarios; they mostly wait
	limit  = 90 * time.Second
)

// Scenarios are all of them.
type Scenarios struct{}

var (
	capital = regexp.MustCompile("[A-Z]")
	place   = regexp.MustCompile(`(?:acknowledging|consuming|producing|subscribing|reading|topics)\.go:\d+`)
)

// AReader becomes a_reader.
func scenarioName(method string) string {
	return strings.TrimPrefix(strings.ToLower(capital.ReplaceAllString(method, "_$0")), "_")
}

func run(scenario func(*Program) any, program *Program) map[string]any {
	rows := make(chan map[string]any, 1)
	go func() {
		defer func() {
			if problem := recover(); problem != nil {
				at := place.FindString(string(debug.Stack()))
				rows <- map[string]any{"failed": fmt.Sprintf("%v at %s", problem, at)}
			}
		}()
		rows <- map[string]any{"seen": scenario(program)}
	}()
	select {
	case row := <-rows:
		return row
	case <-time.After(limit):
		return map[string]any{"failed": "it does not end"}
	}
}

func main() {
	url, http, unique, names := os.Args[1], os.Args[2], os.Args[3], os.Args[4:]
	scenarios := reflect.ValueOf(Scenarios{})
	var running sync.WaitGroup
	var printing sync.Mutex
	slots := make(chan struct{}, atOnce)
	for at := range scenarios.NumMethod() {
		name := scenarioName(scenarios.Type().Method(at).Name)
		if len(names) > 0 && !slices.Contains(names, name) {
			continue
		}
		scenario := scenarios.Method(at).Interface().(func(*Program) any)
		slots <- struct{}{}
		running.Add(1)
		go func() {
			defer running.Done()
			program := &Program{name: name, unique: name + "-" + unique, run: unique, url: url, http: http}
			row := run(scenario, program)
			<-slots
			row["scenario"] = name
			line, err := json.Marshal(row)
			must(err)
			printing.Lock()
			defer printing.Unlock()
			fmt.Println(string(line))
		}()
	}
	running.Wait()
}
