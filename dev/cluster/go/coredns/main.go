// CoreDNS with the few plugins that the embedded cluster needs.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/template"

	"github.com/coredns/coredns/coremain"
)

// A plugin answers in the order of this list, whatever the order in the Corefile: template, the answer to every name that
// is not the cluster's, comes last.
func init() {
	dnsserver.Directives = []string{"bind", "ready", "errors", "log", "cache", "kubernetes", "template"}
}

func main() { coremain.Run() }
