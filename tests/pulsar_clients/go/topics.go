package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/apache/pulsar-client-go/pulsar"
)

func (Scenarios) ATopicThatEnds(p *Program) any {
	topic := p.topic("t")
	consumer := p.consumer(topic, nil)
	producer := p.producer(topic, nil)
	p.send(producer, "a", "b")
	p.admin("POST", path(topic)+"/terminate", "")
	return Seen{
		"got": p.receive(consumer, 2), "then": p.nothing(consumer), "read": p.read(p.reader(topic, nil)),
		"a producer": fails(p.produce(p.client(), topic, nil)),
	}
}

func (Scenarios) ATopicIsUnloaded(p *Program) any {
	topic := p.topic("t")
	consumer := p.consumer(topic, nil)
	producer := p.producer(topic, func(options *pulsar.ProducerOptions) { options.DisableBatching = false })
	sent := numbered("", 300)
	done := make(chan []any)
	for at := 0; at < 300; at += 100 {
		go func() { done <- p.sendAll(producer, texts(sent[at:at+100]...)...) }()
		p.admin("PUT", path(topic)+"/unload", "")
		<-done
	}
	var found []string
	for !slices.Contains(found, "299") {
		if content := contents(consumer, 1)[0]; !slices.Contains(found, content) {
			found = append(found, content)
		}
	}
	return slices.Equal(found, sent)
}

func (Scenarios) MessagesThatAreNotStored(p *Program) any {
	topic := strings.Replace(p.topic("t"), "persistent://", "non-persistent://", 1)
	producer := p.producer(topic, nil)
	p.send(producer, "lost")
	consumer := p.consumer(topic, nil)
	p.send(producer, "a", "b")
	return []any{contents(consumer, 2), p.nothing(consumer)}
}

func (Scenarios) TopicsAreNotMadeHere(p *Program) any {
	topic := "persistent://" + p.namespace("autoTopicCreation", `{"allowAutoTopicCreation": false}`) + "/t"
	return []string{fails(p.produce(p.client(), topic, nil)), fails(p.consume(p.client(), topic, nil))}
}

func (Scenarios) SeveralConnections(p *Program) any {
	topic := p.partitioned(4)
	client := sure(p.open(func(options *pulsar.ClientOptions) { options.MaxConnectionsPerBroker = 4 }))
	producer := sure(p.produce(client, topic, nil))
	consumer := sure(p.consume(client, topic, nil))
	sent := numbered("", 40)
	p.sendAll(producer, texts(sent...)...)
	return slices.Equal(sorted(contents(consumer, 40)), sent)
}

func (Scenarios) AClientThatIsClosed(p *Program) any {
	topic := p.topic("t")
	client := p.newClient()
	producer := sure(p.produce(client, topic, nil))
	consumer := sure(p.consume(client, topic, nil))
	p.send(producer, "a")
	next(consumer, 1)
	client.Close()
	return []any{
		fails(producer.Send(context.Background(), text("b"))), fmt.Sprint(contents(p.consumer(topic, nil), 1)),
	}
}
